"""The figures of a simulated or live run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class Answered:
    """An answered request; times in seconds."""

    arrived: float
    first: float  # time of the first token
    ended: float  # time of the last token
    num_tokens: int  # generated tokens

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.ended - self.first) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trace."""

    answered: tuple[Answered, ...]
    refused: dict[str, int]  # by code
    gaps: tuple[tuple[float, int], ...]  # (seconds between two tokens, count), ascending
    hit_ratio: float  # share of prompt tokens found in the prefix cache
    imbalance: float  # prompt tokens computed by the busiest node, over the mean

    @property
    def ttft(self) -> list[float]:
        """The TTFTs in seconds, ascending."""
        return sorted(each.ttft for each in self.answered)

    def good(self, slo_ttft: float, slo_itl: float) -> int:
        """Returns how many answers met both limits (0: no limit)."""
        return sum(
            (not slo_ttft or each.ttft <= slo_ttft) and (not slo_itl or each.tpot <= slo_itl)
            for each in self.answered
        )

    def row(self, slo_ttft: float = 0.0, slo_itl: float = 0.0) -> dict[str, Any]:
        """Returns name → figure, None if it does not exist."""
        ttft, answered = self.ttft, self.answered
        begun = min((each.arrived for each in answered), default=0.0)
        lasted = max((each.ended for each in answered), default=0.0) - begun
        good = self.good(slo_ttft, slo_itl)
        return {
            "requests": len(answered) + sum(self.refused.values()),
            "refused": sum(self.refused.values()),
            "hit_ratio": round(self.hit_ratio, 4),
            "imbalance": round(self.imbalance, 3),
            "ttft_mean_s": round(fmean(ttft), 4) if ttft else None,
            "ttft_p50_s": _rounded(percentile(ttft, 0.5)),
            "ttft_p99_s": _rounded(percentile(ttft, 0.99)),
            "itl_p50_s": _rounded(weighted_percentile(self.gaps, 0.5)),
            "itl_p99_s": _rounded(weighted_percentile(self.gaps, 0.99)),
            "goodput_per_s": round(good / lasted, 3) if lasted else None,
            "good": round(good / max(1, len(answered) + sum(self.refused.values())), 4),
            "lasted_s": round(lasted, 1),
        }


def percentile(ascending: Sequence[float], share: float) -> float | None:
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def weighted_percentile(ascending: Iterable[tuple[float, int]], share: float) -> float | None:
    pairs = list(ascending)
    left = share * sum(count for _, count in pairs)
    for value, count in pairs:
        left -= count
        if left < 0:
            return value
    return pairs[-1][0] if pairs else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows, which have the same names, as a Markdown table."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    lines += [f"| {' | '.join('–' if v is None else str(v) for v in r.values())} |" for r in rows]
    return "\n".join(lines)
