"""How fast a replica computes, measured on its latest steps. Pure: plain numbers, no clock."""

from __future__ import annotations

from typing import NamedTuple

FADING = 0.98  # what a step counts for after the next one of its kind
FIRST = 8  # steps of each kind that are not measured: caches are cold, kernels are chosen


class Rates(NamedTuple):
    """Seconds; 0: not measured yet."""

    prefill: float = 0.0  # a prompt token
    step: float = 0.0  # a step that only decodes, besides what each sequence adds
    sequence: float = 0.0  # what a sequence adds to it
    transfer: float = 0.0  # that a token's KV was waited for after it was computed elsewhere


class MeasuredRates:
    """Averages over the latest steps and hand-offs, older ones fading; what a sequence adds to a
    step by least squares."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # of steps that compute prompts
        self._moved = self._waited = 0.0  # tokens and seconds of hand-offs
        self._left = {True: FIRST, False: FIRST}  # by whether they compute prompts
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # of other steps: sequences, s

    def step(self, chunk_tokens: int, sequences: int, seconds: float) -> None:
        """Adds a step. What sequences add to one with chunks counts as the chunks'."""
        if self._left[bool(chunk_tokens)]:
            self._left[bool(chunk_tokens)] -= 1
        elif chunk_tokens:
            self._tokens = self._tokens * FADING + chunk_tokens
            self._seconds = self._seconds * FADING + seconds
        else:
            self._n = self._n * FADING + 1
            self._x = self._x * FADING + sequences
            self._y = self._y * FADING + seconds
            self._xx = self._xx * FADING + sequences * sequences
            self._xy = self._xy * FADING + sequences * seconds

    def handed_over(self, num_tokens: int, seconds: float) -> None:
        """Adds a hand-off: so long after the first token was drawn the KV of so many was here."""
        self._moved = self._moved * FADING + num_tokens
        self._waited = self._waited * FADING + seconds

    @property
    def now(self) -> Rates:
        prefill = self._seconds / self._tokens if self._tokens else 0.0
        transfer = self._waited / self._moved if self._moved else 0.0
        if not self._n:
            return Rates(prefill, transfer=transfer)
        x, y = self._x / self._n, self._y / self._n
        variance, slope = self._xx / self._n - x * x, 0.0
        if variance > 0.01 * x * x:  # else all steps are alike, and say nothing of one sequence
            slope = min(max(0.0, (self._xy / self._n - x * y) / variance), y / x)
        return Rates(prefill, y - slope * x, slope, transfer)


def mean_rates(rates: list[Rates]) -> Rates:
    """Returns the mean of each rate over those that have measured it."""
    measured = [[each for each in column if each] for column in zip(*rates, strict=True)]
    return Rates(*(sum(each) / len(each) if each else 0.0 for each in measured))
