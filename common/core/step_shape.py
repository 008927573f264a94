"""Counts what steps compute. The scheduler counts; planning turns counts into FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepShape:
    """The counts of one step or the sum over many."""

    tokens: int = 0  # computed
    cached: int = 0  # earlier tokens whose KV is read
    pairs: int = 0  # (query, key) pairs of attention
    sampled: int = 0  # rows of logits
    steps: int = 0
    sampling_steps: int = 0  # steps with at least one row of logits
    # Per sliding window of the model: `cached` and `pairs` in layers that have it.
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, chunks: Iterable[tuple[int, int]], sampled: int, windows: Iterable[int] = ()
    ) -> StepShape:
        """Returns the shape of one step; `chunks`: (tokens in the cache, tokens to compute) per
        sequence."""
        shape = cls.empty(windows)
        shape.add_step((), [*chunks], sampled)
        return shape

    @classmethod
    def empty(cls, windows: Iterable[int]) -> StepShape:
        """Returns the sum of no steps of a model with these sliding windows."""
        return cls(windows=dict.fromkeys(windows, (0, 0)))

    def add_step(
        self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]], sampled: int
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
        self.windows = {
            window: _add_window(window, counts, decodes, chunks)
            for window, counts in self.windows.items()
        }
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
            {
                window: (cached - other.windows[window][0], pairs - other.windows[window][1])
                for window, (cached, pairs) in self.windows.items()
            },
        )


def _add_window(
    window: int,
    counts: tuple[int, int],
    decodes: Sequence[int],
    chunks: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """Returns (cached, pairs) plus those of one step, in layers where a query sees `window` tokens
    including its own."""
    before = window - 1
    read = sum([min(start, before) for start in decodes])
    cached, pairs = counts[0] + read, counts[1] + read + len(decodes)
    for start, length in chunks:
        cached += min(start, before)
        short = min(max(before - start, 0), length)  # queries that see less than the window
        pairs += short * start + short * (short + 1) // 2 + (length - short) * window
    return cached, pairs
