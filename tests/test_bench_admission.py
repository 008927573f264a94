"""The figures of admission can be made again, and are what SLOs are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_admission import at_load, main, read

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


def test_traces_of_all_forms_are_read_and_scaled(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    row = {"input_length": 40, "output_length": 9, "hash_ids": [1]}
    mooncake.write_text("\n".join(json.dumps({"timestamp": t, **row}) for t in (0, 0, 3000)))
    first, second = read(azure, 10)
    assert (first.prompt, first.output, second.prompt) == (374, 44, 396)
    assert second.time - first.time == pytest.approx(4.314579, abs=1e-3)
    assert [each.time for each in read(mooncake, 10)] == [0.0, 1.5, 3.0]
    once, twice = (at_load(read(SAMPLE, 100), load) for load in (1, 2))
    assert once[-1].time == pytest.approx(2 * twice[-1].time)
