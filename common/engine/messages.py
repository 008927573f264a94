"""What the scheduler tells the ranks each step, and what they answer.

A step names what is new and nothing else: ranks remember the rest (`input_batch.py`). Steps
are numbered and every rank gets all of them in one order, so a rank that missed one knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.sampling import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What stays the same of a sequence, told with the first step that takes it after each
    admission."""

    sampling: SamplingParams
    num_prompt_tokens: int
    seed: int  # sampling.seed + choice
    min_tokens_bans: tuple[int, ...] = ()  # what sampling.min_tokens forbids: EOS, stop ids
    history: tuple[int, ...] = ()  # prompt + output so far, if sampling.needs_history
    adapter: str = ""  # digest of the LoRA adapter that computes it


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """One sequence's share of a step: compute `token_ids` at positions
    `start … start+len(token_ids)-1`, writing their KV into its blocks; and behind them `drafts`,
    guesses of what follows (`speculation.py`)."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    num_blocks: int = 0  # it had before
    new_block_ids: tuple[int, ...] = ()  # appended to them
    samples: bool = False  # false: a chunk that is not the last; no token is drawn
    new: NewSequence | None = None  # None: the ranks know it
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0  # of `drafts`, or of those that the draft model makes of them
    again: bool = False  # its last token was computed before, and deferred
    # Prompt tokens whose log-probabilities are wanted: those that follow the first of `token_ids`.
    scored: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDelta:
    """One forward pass. `step` is one more than that of the last."""

    step: int
    sequences: tuple[SequenceDelta, ...]
    ended: tuple[int, ...] = ()  # seq_ids to forget first; those come again as new ones, if ever
    drafting: tuple[SequenceDelta, ...] = ()  # for the draft model, in blocks of its own cache


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What one step asked of the experts in the layers of the last pipeline stage."""

    assignments: tuple[int, ...]  # (token, expert) pairs by expert-parallel rank, over the layers
    balancedness: float  # mean / max load of an expert, mean over the layers: 1 is even


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens drawn in one step: (seq_id, token) for every sequence that had sampling, or
    else (seq_id, why there is none). Of a sequence whose drafts were right there are several, in
    order: so many drafts, and one more."""

    step: int
    tokens: tuple[tuple[int, SampledToken], ...]
    experts: ExpertLoad | None = None  # None: the answering rank has no layer with experts
    failed: tuple[tuple[int, str], ...] = ()
    forbidden: tuple[int, ...] = ()  # of the failed: those whose own parameters forbid every token
    deferred: tuple[int, ...] = ()  # seq_ids that have neither: to be asked again
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()  # of the tokens that were to be scored


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One rank's KV cache: a tensor
    `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]` (2 = key, value) whose
    layers and heads are `layer_start…layer_end`, `head_start…head_end` of the model's."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    num_blocks: int
    block_size: int
    head_dim: int
    dtype: str  # "float32", "bfloat16", "float16"


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a rank's device can do at most, as measured or as --peak-… say."""

    flops: float  # a second, of large products of matrices in the dtype
    bandwidth: float  # bytes read a second


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank's answer once its weights are loaded and its cache is allocated."""

    rank: int
    cache: CacheShape
    weights_bytes: int
    peaks: Peaks
    extension_info: bytes = b""  # what the rank's extension announces (a connector endpoint)
