"""What steps compute, in numbers: scheduling counts it, planning turns it into FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StepShape:
    """Of one step or, added up, of many."""

    tokens: int = 0  # computed
    cached: int = 0  # tokens before them, whose KV is read
    pairs: int = 0  # of a query and a key that it attends to
    sampled: int = 0  # rows of logits
    steps: int = 0
    sampling_steps: int = 0  # those with a row of logits at least

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], sampled: int) -> StepShape:
        """One step; `chunks`: of each sequence the tokens in the cache and those computed now."""
        shape = cls()
        shape.add_step((), chunks, sampled)
        return shape

    def add_step(
        self, decodes: Sequence[int], chunks: Iterable[tuple[int, int]], sampled: int
    ) -> None:
        """`decodes`: the tokens in the cache of each sequence that computes one; the others as
        `chunks`. A step has many of the former, and this must cost it nothing."""
        cached = sum(decodes)
        self.tokens += len(decodes)
        self.cached += cached
        self.pairs += cached + len(decodes)
        for start, length in chunks:
            self.tokens += length
            self.cached += start
            self.pairs += length * start + length * (length + 1) // 2
        self.sampled += sampled
        self.steps += 1
        self.sampling_steps += sampled > 0

    def __sub__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.tokens - other.tokens,
            self.cached - other.cached,
            self.pairs - other.pairs,
            self.sampled - other.sampled,
            self.steps - other.steps,
            self.sampling_steps - other.sampling_steps,
        )
