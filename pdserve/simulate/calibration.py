"""The durations of steps and transfers on some hardware: tables that `pdserve calibrate` measures.

    prefill[tokens, cached]     a step that computes `tokens` prompt tokens after `cached` ones
    decode[sequences, context]  a step that decodes `sequences` sequences of `context` tokens
    transfer[bytes]             from the last KV computed to the decode node's first step

Values are interpolated linearly in each direction, and extrapolated from the last two points. A
step with prompt chunks and decoding sequences takes as long as prefill of all its tokens, plus the
time to read the sequences' context.

The tables have medians. `Scatter` says how far measurements were from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdserve.common.core.errors import ConfigError

LEAST = 1e-6  # seconds; no step is shorter
MOST_SECONDS = 3600.0  # of a step, a transfer, or the other parts of an answer
MOST_BYTES = 1e9  # of the KV of a token
MOST_RATIO = 999.0  # of a duration over its median, or over the one of a node alone


class Scatter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantiles of measured durations over their medians, evenly spaced from the least to the
    most. An empty list: no scatter."""

    prefill: list[float] = []  # steps with prompts
    decode: list[float] = []  # runs of decode steps
    transfer: list[float] = []
    router: list[float] = []
    reserve: list[float] = []
    prefill_beside: list[float] = []  # while another node of the host computes
    decode_beside: list[float] = []
    transfer_beside: list[float] = []  # while the decode node computes
    router_beside: list[float] = []
    reserve_beside: list[float] = []


def drawn(quantiles: Sequence[float], share: float) -> float:
    """Returns the quantile of `share`, from 0 to 1."""
    if not quantiles:
        return 1.0
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (at - low) * (quantiles[high] - quantiles[low])


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content. A table's rows have its arguments and the seconds."""

    model: str
    device: str
    prefill: list[tuple[int, int, float]]  # tokens, cached, seconds
    decode: list[tuple[int, int, float]]  # sequences, context, seconds
    transfer: list[tuple[int, float]]  # bytes, seconds
    kv_bytes_per_token: float
    router_s: float = 0.0  # a request's time to its first token, less what follows and the steps
    reserve_s: float = 0.0  # until the decode node has reserved blocks
    answer_s: float = 0.0  # its time after the first token, less the steps and the hand-off
    cores: float = 1.0  # of a node; 0: it computes on a GPU
    # Slowdown of a step with prompts, and of one that only decodes, while another node of the host
    # computes: at least 1.
    prefill_beside: float = 1.0
    decode_beside: float = 1.0
    # Slowdown of `router_s`, `reserve_s` and the transfer while the decode node computes.
    router_beside: float = 1.0
    reserve_beside: float = 1.0
    transfer_beside: float = 1.0
    scatter: Scatter = Scatter()

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


_decoder = msgspec.json.Decoder(Calibration)


def read_calibration(path: Path) -> Calibration:
    """Reads the file; raises ConfigError if `pdserve calibrate` did not write it."""
    try:
        found = _decoder.decode(path.read_bytes())
        Times(found)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"--calibration {path}: {error}; make one with: pdserve calibrate --output FILE"
        ) from error
    return found


def linear(tokens_per_s: float, step_s: float = 0.02) -> Calibration:
    """Returns a calibration of a node that prefills `tokens_per_s`, whose decode steps all take
    `step_s` seconds, and whose hand-off takes no time."""
    return Calibration(
        model="linear",
        device="none",
        prefill=[(0, 0, 0.0), (1_000_000, 0, 1_000_000 / tokens_per_s)],
        decode=[(1, 1, step_s)],
        transfer=[(0, 0.0)],
        kv_bytes_per_token=0.0,
    )


class Line:
    """A function of one argument, linear between points."""

    def __init__(self, points: dict[float, float]) -> None:
        self.xs = sorted(points)
        self._ys = [points[x] for x in self.xs]

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self._ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        share = (x - xs[i]) / (xs[i + 1] - xs[i])
        return ys[i] + share * (ys[i + 1] - ys[i])


class Grid:
    """A function of two arguments: a `Line` over the second for each point of the first."""

    def __init__(self, rows: Sequence[tuple[float, float, float]]) -> None:
        points: dict[float, dict[float, float]] = {}
        for x, y, value in rows:
            points.setdefault(x, {})[y] = value
        if not points:
            raise ValueError("a table is empty")
        self.xs = sorted(points)
        self._lines = [Line(points[x]) for x in self.xs]

    def __call__(self, x: float, y: float) -> float:
        xs = self.xs
        if len(xs) == 1:
            return self._lines[0](y)
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        share = (x - xs[i]) / (xs[i + 1] - xs[i])
        low = self._lines[i](y)
        return low + share * (self._lines[i + 1](y) - low)


@dataclass(slots=True)
class Work:
    """The work of one step."""

    chunk_tokens: int = 0  # prompt tokens computed
    chunk_cached: int = 0  # cached tokens before them, averaged with the tokens as weights
    sequences: int = 0  # decoding sequences
    context: int = 0  # their tokens in total


class Times:
    """Computes durations from a calibration."""

    def __init__(self, calibration: Calibration, speed: float = 1.0) -> None:
        """`speed`: this node's speed, relative to the calibrated one. Raises ValueError: a table is
        empty, or a number is out of range."""
        rows = (*calibration.prefill, *calibration.decode, *calibration.transfer)
        if any(not (0 <= number < float("inf")) for row in rows for number in row):
            raise ValueError("a table has a negative or non-finite number")
        parts = {n: getattr(calibration, n) for n in ("router_s", "reserve_s", "answer_s")}
        if not all(0 <= each <= MOST_SECONDS for each in (*parts.values(), *(r[-1] for r in rows))):
            raise ValueError(
                f"{', '.join(parts)} and the tables' seconds are from 0 to {MOST_SECONDS:.0f}"
            )
        if not 0 <= calibration.kv_bytes_per_token <= MOST_BYTES:
            raise ValueError(f"kv_bytes_per_token is from 0 to {MOST_BYTES:.0e}")
        if not calibration.transfer:
            raise ValueError("a table is empty")
        scatter = msgspec.structs.asdict(calibration.scatter)
        beside = {
            n: v for n, v in msgspec.structs.asdict(calibration).items() if n.endswith("beside")
        }
        if (
            not all(1 <= each <= MOST_RATIO for each in beside.values())
            or not 0 <= calibration.cores < 1e6
        ):
            raise ValueError(f"{', '.join(beside)} are at least 1, cores at least 0")
        if any(not 0 < each <= MOST_RATIO for found in scatter.values() for each in found):
            raise ValueError(f"scatter has a number that is not above 0 and up to {MOST_RATIO:.0f}")
        self._prefill = Grid(calibration.prefill)
        self._decode = Grid(calibration.decode)
        self._shortest = min(context for _, context, _ in calibration.decode)
        self._transfer = Line(dict(calibration.transfer))
        self._calibration = calibration
        self._speed = speed
        self._bytes_per_token = calibration.kv_bytes_per_token

    def step(self, work: Work) -> float:
        """Returns the seconds that a step takes."""
        seconds = 0.0
        if work.sequences:
            mean = work.context / work.sequences
            seconds = self._decode(work.sequences, mean)
        if work.chunk_tokens:
            cached = work.chunk_cached / work.chunk_tokens
            if work.sequences:
                seconds -= self._decode(work.sequences, self._shortest)
            seconds += self._prefill(work.chunk_tokens + work.sequences, cached)
        return max(LEAST, seconds / self._speed)

    def scattered(self, work: Work, share: float) -> tuple[float, float]:
        """Returns the factor on the seconds of `step` for a step alone, and the further slowdown
        while another node of its host computes. `share`: the quantile, from 0 (the fastest of such
        steps) to 1."""
        times, scatter = self._calibration, self._calibration.scatter
        if work.chunk_tokens:
            alone = drawn(scatter.prefill, share)
            return alone, times.prefill_beside * drawn(scatter.prefill_beside, share) / alone
        alone = drawn(scatter.decode, share)
        return alone, times.decode_beside * drawn(scatter.decode_beside, share) / alone

    @property
    def hand_over(self) -> float:
        """The seconds of a transfer besides moving bytes."""
        return self._transfer(0)

    def move(self, num_tokens: int) -> float:
        """Returns the seconds to move the KV of `num_tokens` tokens."""
        return max(0.0, self._transfer(num_tokens * self._bytes_per_token) - self._transfer(0))
