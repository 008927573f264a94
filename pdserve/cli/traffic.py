"""Computes a router's latencies, token rate and prefix hit rate from its `/metrics`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdserve.common.core.errors import NodeError

WINDOW = 10.0  # seconds
# What is read, by a name without its prefix: `pdserve_`, or vLLM's `vllm:`.
_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
_OUT, _IN, _CACHED = "generation_tokens_total", "prompt_tokens_total", "prompt_tokens_cached_total"
_READ = {f"{name}_{part}" for name in (_TTFT, _ITL) for part in ("sum", "count")}
_READ |= {_OUT, _IN, _CACHED}

Totals = dict[str, float]


class Traffic:
    """Means of the last WINDOW seconds between calls of `add`; after one call, of the router's
    whole life."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Totals]] = deque()
        self._uptime = 0.0

    def add(self, text: object, uptime: float) -> None:
        """Takes the router's metrics now; raises NodeError if they cannot be read."""
        if not isinstance(text, str):
            raise NodeError("the router's /metrics is no text")
        totals = _totals(text)
        if self._seen and totals[_OUT] < self._seen[-1][1][_OUT]:
            self._seen.clear()  # the router has restarted
        self._uptime = uptime
        self._seen.append((monotonic(), totals))
        while len(self._seen) > 2 and self._seen[1][0] <= self._seen[-1][0] - WINDOW:
            self._seen.popleft()

    def rates(self) -> dict[str, float | None]:
        """Returns numbers for JSON; None without a request."""
        now, totals = self._seen[-1]
        began, before = self._seen[0] if len(self._seen) > 1 else (now - self._uptime, {})
        grown = {name: totals[name] - before.get(name, 0.0) for name in totals}

        def ratio(above: str, below: str) -> float | None:
            return grown[above] / grown[below] if grown[below] > 0 else None

        seconds = now - began
        return {
            "ttft_seconds": ratio(f"{_TTFT}_sum", f"{_TTFT}_count"),
            "itl_seconds": ratio(f"{_ITL}_sum", f"{_ITL}_count"),
            "tokens_per_second": grown[_OUT] / seconds if seconds > 0 else None,
            "prefix_hit_rate": ratio(_CACHED, _IN),
        }


def shown_rates(rates: Mapping[str, Any]) -> str:
    """Returns the rates as one line; "–" where there was no request."""
    forms: dict[str, Any] = {
        "ttft_seconds": lambda value: f"TTFT {1e3 * value:.1f} ms",
        "itl_seconds": lambda value: f"ITL {1e3 * value:.1f} ms",
        "tokens_per_second": lambda value: f"{value:,.1f} tok/s",
        "prefix_hit_rate": lambda value: f"prefix hits {value:.0%}",
    }
    none = dict(zip(forms, ("TTFT –", "ITL –", "– tok/s", "prefix hits –"), strict=True))
    return ", ".join(
        none[name] if rates[name] is None else form(rates[name]) for name, form in forms.items()
    )


def _totals(text: str) -> Totals:
    """Returns the sums over all series of each name; the ones of vLLM repeat ours."""
    ours: Totals = {}
    theirs: Totals = {}
    try:
        for sample in (s for f in text_string_to_metric_families(text) for s in f.samples):
            for prefix, found in (("pdserve_", ours), ("vllm:", theirs)):
                name = sample.name.removeprefix(prefix)
                if name != sample.name and name in _READ:
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError as error:
        raise NodeError(f"the router's metrics cannot be read: {error}") from error
    totals = theirs | ours
    if missing := _READ - totals.keys():
        raise NodeError(f"the router's metrics lack {sorted(missing)[0]}")
    return totals
