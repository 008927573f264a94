"""A step as a rank computes it: everything its model and its sampler need to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.common.core.sampling import SamplingParams
from pdserve.common.model.attention import BlockIds


@dataclass(frozen=True, slots=True)
class StepSequence:
    """One sequence's share of a step: `token_ids` are at positions
    `start … start+len(token_ids)-1`; their KV goes into the blocks of `block_table`."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_table: Sequence[int] | BlockIds
    sampling: SamplingParams | None = None  # None: a chunk that is not the last; no token drawn
    counts: TokenCounts | None = None  # of prompt + output so far, only if sampling.penalised
    banned_token_ids: tuple[int, ...] = ()  # tokens min_tokens forbids now (EOS, stop ids)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass."""

    step: int
    sequences: tuple[StepSequence, ...]


class TokenCounts:
    """Which tokens occur in a sequence's prompt (`prompt`, bool `[vocab]`) and how often each
    does in its output (`output`, float32 `[vocab]`)."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(vocab_size, device=device)

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> TokenCounts:
        counts = cls(vocab_size)
        counts.add(prompt, output)
        return counts

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """More tokens of each."""
        if prompt:
            self.prompt[self._ids(prompt)] = True
        if output:
            ids = self._ids(output)
            self.output.scatter_add_(0, ids, torch.ones_like(ids, dtype=self.output.dtype))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, device=self.output.device)
