"""What the scheduler tells the ranks each step, and what they answer.

Ranks keep no per-sequence state: every step names everything it needs. That costs a few
microseconds and means that a rank can never disagree with the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.core.sampling import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class StepSequence:
    """One sequence's share of a step: compute `token_ids` at positions
    `start … start+len(token_ids)-1`, writing their KV into `block_table`."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sampling: SamplingParams | None = None  # None: a chunk that is not the last; no token drawn
    num_prompt_tokens: int = 0
    history: tuple[int, ...] = ()  # prompt + output so far, only if sampling.penalised
    banned_token_ids: tuple[int, ...] = ()  # tokens min_tokens forbids now (EOS, stop ids)
    seed: int = 0  # sampling.seed + choice


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass."""

    step: int
    sequences: tuple[StepSequence, ...]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What one step asked of the experts in the layers of the last pipeline stage."""

    assignments: tuple[int, ...]  # (token, expert) pairs by expert-parallel rank, over the layers
    balancedness: float  # mean / max load of an expert, mean over the layers: 1 is even


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens drawn in one step: (seq_id, token) for every sequence that had sampling."""

    step: int
    tokens: tuple[tuple[int, SampledToken], ...]
    experts: ExpertLoad | None = None  # None: the answering rank has no layer with experts


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
class RankReady:
    """A rank's answer once its weights are loaded and its cache is allocated."""

    rank: int
    cache: CacheShape
    weights_bytes: int
    device: str
    extension_info: bytes = b""  # what the rank's extension announces (a connector endpoint)
