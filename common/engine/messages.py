"""Messages between the scheduler and the ranks.

A step contains only what is new; ranks remember the rest (`input_batch.py`). Steps are numbered and
every rank gets all of them in order, so a rank notices if it missed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.sampling import SampledToken, SamplingParams

DRAWN = -1
"""Token id of the token that the ranks' last step sampled for the sequence."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The constant part of a sequence, sent with its first step after each admission."""

    sampling: SamplingParams
    num_prompt_tokens: int
    seed: int  # sampling.seed + choice
    min_tokens_bans: tuple[int, ...] = ()  # tokens that sampling.min_tokens forbids: EOS, stop ids
    history: tuple[int, ...] = ()  # prompt + output so far, if sampling.needs_history
    adapter: str = ""  # digest of its LoRA adapter


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """One sequence's part of a step: compute `token_ids` at positions
    `start … start+len(token_ids)-1`, then the draft tokens `drafts` (`speculation.py`), and write
    their KV into its blocks. `token_ids` are known, or only (DRAWN,)."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    # Per KV group: the length of its block table before, and what is appended to it.
    num_blocks: tuple[int, ...] = (0,)
    new_block_ids: tuple[tuple[int, ...], ...] = ((),)
    samples: bool = False  # false: a chunk before the last, which samples no token
    new: NewSequence | None = None  # None: the ranks know the sequence
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0  # length of `drafts`, or how many the draft model shall make
    again: bool = False  # its last token was already computed, but not sampled (deferred)
    # Prompt tokens to score: those that follow each of `token_ids`.
    scored: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDelta:
    """One forward pass. `step` increases by one each time."""

    step: int
    sequences: tuple[SequenceDelta, ...]
    ended: tuple[int, ...] = ()  # seq_ids to forget first; if they return, they are new
    drafting: tuple[SequenceDelta, ...] = ()  # for the draft model, in blocks of its own cache


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of the experts in one step, in the layers of the last pipeline stage."""

    assignments: tuple[int, ...]  # (token, expert) pairs by expert-parallel rank, over the layers
    balancedness: float  # mean ÷ max load of an expert, averaged over the layers; 1: even


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step. `tokens`: (seq_id, token), in order, for the sequences that sampled:
    the accepted drafts and one more token. `failed`: (seq_id, reason) for those without a token."""

    step: int
    tokens: tuple[tuple[int, SampledToken], ...]
    experts: ExpertLoad | None = None  # None: the answering rank has no MoE layer
    failed: tuple[tuple[int, str], ...] = ()
    forbidden: tuple[int, ...] = ()  # failed seq_ids whose own parameters forbid every token
    deferred: tuple[int, ...] = ()  # seq_ids without a result yet, to schedule again
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()  # scores of prompt tokens


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One rank's KV cache of one KV group: a tensor
    `[num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim]` (2 planes: key, value;
    1: latents) whose layers are `layer_start…layer_end` of the group's and whose heads are
    `head_start…head_end` of the model's. A stage may have no layer of a group."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    num_blocks: int
    block_size: int
    head_dim: int  # numbers of a row: see `kv_row`
    dtype: str  # "float32", "bfloat16", "float16", "uint8"
    planes: int = 2


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak speeds of a rank's device, measured or from --peak-…."""

    flops: float  # FLOP/s in large matrix products in the dtype
    bandwidth: float  # bytes read per second


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank's answer once its weights are loaded and its cache is allocated."""

    rank: int
    caches: tuple[CacheShape, ...]  # one per KV group of the model
    weights_bytes: int
    peaks: Peaks
    extension_info: bytes = b""  # what the rank's extension announces (a connector endpoint)
    cores: tuple[int, ...] = ()  # entries of the --share-cores table that it owns


# ---- calls about LoRA adapters, beside the steps ----

LOADED = b"\x01"
_MARK = b"\xc1"  # invalid in msgpack, which is the format of a rank's other calls


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Starts to load an adapter. The answer is LOADED once it can be used, empty before: calls are
    served one by one, and calls about KV must not wait for file reads."""

    digest: str
    path: str  # folder, the same on every host


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Drops an adapter that no sequence uses."""

    digest: str


AdapterCall = LoadAdapter | DropAdapter

_adapter_calls = msgspec.msgpack.Decoder(AdapterCall)


def encode_adapter_call(call: AdapterCall) -> bytes:
    return _MARK + msgspec.msgpack.encode(call)


def decode_adapter_call(message: bytes) -> AdapterCall | None:
    """Returns the call, or None if the message is for another extension."""
    if not message.startswith(_MARK):
        return None
    call: AdapterCall = _adapter_calls.decode(message[1:])
    return call
