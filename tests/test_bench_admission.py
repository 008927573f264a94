"""The figures of admission can be made again, and are what SLOs are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_admission_live as live
from benchmarks.bench_admission import PREFILL_NODES, RATE, at_load, main, read

SAMPLE = Path(__file__).parent.parent / "benchmarks" / "traces" / "mooncake_conversation.csv.gz"


def test_slos_keep_more_promises_than_any_limits_and_no_client_starves(
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


def test_answers_of_a_live_cluster_are_good_late_or_refused() -> None:
    asks = live.at_load(live.read(SAMPLE, 50), per_s=1000, load=2)
    assert sum(each.tokens for each in asks) / asks[-1].time == pytest.approx(2 * 1000)
    assert all(8 <= each.tokens <= live.MOST for each in asks)
    ask = live.Ask(0.0, 600, "key-0")
    answers = [
        live.Answer(ask, seconds, refused)
        for seconds, refused in ((1.1, False), (1.3, False), (0.1, True), (31.0, True))
    ]
    row = live.summary(answers, promise=0.5, per_s=1000)
    assert (row["good"], row["late"], row["refused"], row["starved"]) == (1, 1, 2, 1)
