"""The figures of placement policies can be made again, and are what each is chosen for."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench_placement_live as live
from benchmarks.bench_placement import TRACES, main, place
from benchmarks.bench_placement_live import SIZE, cut, prompt
from pdserve.simulate.traces import read_trace
from pdserve.simulate.workloads import conversations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "least", "ideal"), [("500", 0.92, 0.0835), ("0", 0.94, 0.1497)]
)
def test_prefix_aware_finds_what_can_be_found_and_shares_the_work(
    requests: str, least: float, ideal: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`requests`: the first ones of each trace; of fewer, more meet caches that are still cold."""
    out = tmp_path / "rows.json"
    policies = ["--policy=round-robin", "--policy=least-load", "--policy=prefix-aware"]
    assert main([*policies, f"--requests={requests}", f"--json={out}"]) == 0
    rows = {(row["trace"], row["policy"]): row for row in json.loads(out.read_text())}
    for trace in ("mooncake_conversation", "mooncake_synthetic", "one system prompt"):
        found, turns = rows[trace, "prefix-aware"], rows[trace, "round-robin"]
        assert found["of_ideal"] >= least and found["imbalance"] <= 1.05
        assert all(found[name] <= turns[name] for name in ("ttft_mean_s", "ttft_p99_s"))
    found, load = (rows["mooncake_conversation", name] for name in ("prefix-aware", "least-load"))
    assert found["ttft_p99_s"] <= 0.75 * load["ttft_p99_s"]
    assert f"| mooncake_synthetic | ideal | {ideal} | 1.0 | 1.0 | – |" in capsys.readouterr().out


@pytest.mark.slow
def test_cost_finds_as_much_and_answers_sooner() -> None:
    asks = read_trace(TRACES / "mooncake_synthetic.csv.gz")
    cost, found, load = (
        place(policy, asks, "4P4D", 2500, 10_000)
        for policy in ("cost", "prefix-aware", "least-load")
    )
    assert cost.hit_ratio >= found.hit_ratio and cost.imbalance <= 1.05
    first = cost.row()["ttft_p99_s"]
    assert first <= min(found.row()["ttft_p99_s"], 0.6 * load.row()["ttft_p99_s"])


def test_cost_bears_late_events_and_a_node_that_joins_with_nothing_cached() -> None:
    asks = conversations(400, 10.0)
    late = {"event_delay": 3.0, "joining": "1P", "join_after": 15.0}
    found, load, turns = (
        place(policy, asks, "3P1D", 2500, 10_000, **late)
        for policy in ("cost", "least-load", "round-robin")
    )
    assert found.hit_ratio > 1.3 * max(load.hit_ratio, turns.hit_ratio)
    for name in ("ttft_mean_s", "ttft_p99_s"):
        assert found.row()[name] <= min(load.row()[name], turns.row()[name])


def test_both_forms_of_a_trace_say_the_same(tmp_path: Path) -> None:
    sample = Path(__file__).parent.parent / "benchmarks" / "traces" / "mooncake_synthetic.csv.gz"
    first = read_trace(sample, 50)
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": each.num_tokens,
            "output_length": 1,
            "hash_ids": [3, 4],
        }
        for number, each in enumerate(first)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    again = read_trace(path)
    assert [each.num_tokens for each in again] == [each.num_tokens for each in first]
    assert [each.time for each in again] == list(range(50))
    assert len(set(again[0].blocks)) == 2 and len({each.time for each in first}) == 50


def test_live_prompts_begin_alike_where_the_trace_s_do() -> None:
    sample = Path(__file__).parent.parent / "benchmarks" / "traces" / "mooncake_conversation.csv.gz"
    arrivals = [cut(each) for each in read_trace(sample, 200)]
    of_blocks: dict[tuple[int, ...], tuple[int, ...]] = {}
    for each in arrivals:
        tokens = prompt(each)
        assert len(tokens) == each.num_tokens <= 961
        for end in range(1, len(each.blocks) + 1):
            blocks, begin = tuple(each.blocks[:end]), tuple(tokens[: end * SIZE])
            assert of_blocks.setdefault(blocks, begin) == begin
    assert len(set(of_blocks.values())) == len(of_blocks)


def test_live_ratios_stand_beside_simulated_ones(tmp_path: Path) -> None:
    """Half of these prompts' tokens are cached somewhere: at a load near the capacity of
    `least-load` that pays, and nothing is better than the ideal."""
    pytest.importorskip("matplotlib")
    args = Namespace(nodes=3, blocks=1000, clients=8, load=0.9)
    trace = [replace(each, num_tokens=each.num_tokens // 32) for each in conversations(400, 1.0)]
    policies = ("least-load", "cost")
    simulated = live.simulated_rows(args, policies, trace)
    rows = [
        {
            "policy": policy,
            "round": number,
            "ttft_mean_ms": ms,
            "ttft_p50_ms": ms,
            "ttft_p99_ms": ms,
        }
        for number in (1, 2)
        for policy, ms in zip(policies, (100, 40 + 10 * number), strict=True)
    ]
    least, cost, ideal = live.compared(rows, simulated)
    assert cost["mean live"] == "0.55 (0.50–0.60)" and least["p99 live"] == "1.00 (1.00–1.00)"
    assert ideal["mean live"] is None
    for name in live.TIMES:
        key = f"{name} simulated"
        assert float(ideal[key]) <= float(cost[key]) < float(least[key]) == 1.0
    live.plot(rows, simulated, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 5000
