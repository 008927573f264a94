"""Counts what steps compute. The scheduler counts; planning turns counts into FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StepShape:
    """The counts of one step or the sum over many."""

    tokens: int = 0  # computed
    cached: int = 0  # earlier tokens whose KV is read
    pairs: int = 0  # (query, key) pairs of attention
    sampled: int = 0  # rows of logits
    steps: int = 0
    sampling_steps: int = 0  # steps with at least one row of logits

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], sampled: int) -> StepShape:
        """Returns the shape of one step; `chunks`: (tokens in the cache, tokens to compute) per
        sequence."""
        shape = cls()
        shape.add_step((), chunks, sampled)
        return shape

    def add_step(
        self, decodes: Sequence[int], chunks: Iterable[tuple[int, int]], sampled: int
    ) -> None:
        """Adds a step. `decodes`: tokens in the cache per sequence that computes one token;
        `chunks`: the others, as in `of`. There are many decodes, so they take a faster path."""
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
