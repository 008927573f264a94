"""The rates that `pdserve top` shows, from metrics of a real registry."""

from __future__ import annotations

import pytest

from pdserve.cli import traffic
from pdserve.cli.traffic import Traffic, shown_rates
from pdserve.common.core.errors import NodeError
from pdserve.common.obs.exposition import ROUTER_NAMES, Exposition, exposed
from pdserve.common.obs.metrics import RouterMetrics


@pytest.mark.parametrize("prefix", ["pdserve", "vllm", "both"])
def test_top_shows_ttft_itl_tokens_and_hits(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(traffic, "monotonic", lambda: now)
    metrics, seen = RouterMetrics(), Traffic()

    def look() -> str:
        shown = Exposition(metrics.registry, "m", prefix, ROUTER_NAMES)
        seen.add(exposed(shown).decode(), uptime=20.0)
        return shown_rates(seen.rates())

    def answer(ttft: float, itl: float, tokens: int, cached: int) -> None:
        metrics.ttft.observe(ttft)
        metrics.itl.observe_all([itl] * tokens)
        metrics.generation_tokens.inc(tokens)
        metrics.prompt_tokens.inc(100)
        metrics.cached_tokens.inc(cached)

    assert look() == "TTFT –, ITL –, 0.0 tok/s, prefix hits –"
    seen = Traffic()
    answer(0.5, 0.01, 20, 50)
    assert look() == "TTFT 500.0 ms, ITL 10.0 ms, 1.0 tok/s, prefix hits 50%", "of 20 seconds"
    now = 101.0
    answer(0.1, 0.02, 30, 0)
    assert look() == "TTFT 100.0 ms, ITL 20.0 ms, 30.0 tok/s, prefix hits 0%", "since the last"
    now = 106.0
    look()
    now = 117.0  # what is older than ten seconds is forgotten
    assert look() == "TTFT –, ITL –, 0.0 tok/s, prefix hits –"
    metrics = RouterMetrics()  # it restarts
    answer(0.2, 0.03, 10, 100)
    assert look() == "TTFT 200.0 ms, ITL 30.0 ms, 0.5 tok/s, prefix hits 100%"


@pytest.mark.parametrize("text", [{}, "<html>", "", "pdserve_x{ 1"])
def test_metrics_that_cannot_be_read(text: object) -> None:
    with pytest.raises(NodeError, match="metrics"):
        Traffic().add(text, 1.0)
