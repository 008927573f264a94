"""The figures of admission can be made again, and are what SLOs are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_admission import PREFILL_NODES, RATE, at_load, main, read

SAMPLE = Path(__file__).parent.parent / "benchmarks" / "traces" / "mooncake_conversation.csv.gz"


def test_slos_keep_more_promises_than_any_limits_and_nobody_starves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    argv = ["--requests=400", "--loads=3", f"--trace={SAMPLE}", f"--json={out}"]
    assert main(argv) == 0
    rows = {row["way"]: row for row in json.loads(out.read_text())}
    assert rows["slo"]["goodput"] >= 1.3 * rows["static"]["goodput"]
    assert rows["slo"]["goodput"] >= 1.1 * rows["tuned"]["goodput"]
    assert rows["slo"]["starved"] == 0 < rows["fifo"]["starved"]
    assert rows["slo"]["late"] <= 0.2 * rows["slo"]["good"]
    assert "| mooncake_conversation | 3.0 | slo |" in capsys.readouterr().out


def test_a_trace_is_sped_up_to_a_load() -> None:
    once, twice = (at_load(read(SAMPLE, 100), load) for load in (1, 2))
    assert once[-1].time == pytest.approx(2 * twice[-1].time)
    tokens = sum(each.prompt for each in once)
    assert tokens / once[-1].time == pytest.approx(PREFILL_NODES * RATE)
