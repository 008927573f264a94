"""How fast a replica computes, measured on its latest steps. Pure: plain numbers, no clock."""

from __future__ import annotations

from typing import NamedTuple

FADING = 0.98  # factor on a step's weight at each later step of its kind
FIRST = 8  # first steps of each kind to skip: caches are cold, kernels not selected


class Rates(NamedTuple):
    """Seconds; 0: not measured yet."""

    prefill: float = 0.0  # per prompt token
    step: float = 0.0  # per step that only decodes, besides its sequences
    sequence: float = 0.0  # per sequence of such a step
    transfer: float = 0.0  # waiting time per token of KV after another node has computed it


class MeasuredRates:
    """Averages over steps and hand-offs with exponentially fading weights. Least squares split the
    time of a decode step into a constant and a part per sequence."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # sums over steps with prompt chunks
        self._moved = self._waited = 0.0  # sums over hand-offs: tokens, seconds
        self._left = {True: FIRST, False: FIRST}  # steps to skip, by whether they have chunks
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # x: sequences, y: seconds

    def step(self, chunk_tokens: int, sequences: int, seconds: float) -> None:
        """Adds a step. All seconds of a step with prompt chunks count as the chunks'."""
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
        """Adds a hand-off: `seconds` from the first token to the arrival of all KV."""
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
        if variance > 0.01 * x * x:  # else batch sizes vary too little
            slope = min(max(0.0, (self._xy / self._n - x * y) / variance), y / x)
        return Rates(prefill, y - slope * x, slope, transfer)


def mean_rates(rates: list[Rates]) -> Rates:
    """Returns the mean of each rate over the replicas that have measured it."""
    measured = [[each for each in column if each] for column in zip(*rates, strict=True)]
    return Rates(*(sum(each) / len(each) if each else 0.0 for each in measured))
