"""`pdserve simulate`: virtual time, steps that add up, traces of all forms, and bad input."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from types import MappingProxyType, SimpleNamespace

import pytest
from msgspec import structs

from paths import MODELS, ROOT
from pdserve.cli.main import main
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.core.errors import ConfigError
from pdserve.router.cluster.policies import load_policy
from pdserve.simulate import engine
from pdserve.simulate.calibrate import LONG, Points, measure
from pdserve.simulate.calibration import (
    Calibration,
    Grid,
    Times,
    Work,
    linear,
    read_calibration,
)
from pdserve.simulate.clock import run_virtually
from pdserve.simulate.cluster import ROLES, Setup, read_layout, simulate
from pdserve.simulate.outcome import Outcome, weighted_percentile
from pdserve.simulate.traces import read_trace
from pdserve.simulate.workloads import Arrival, hash_of, shared_prompt

TIMES = Calibration(
    model="m",
    device="d",
    prefill=[(0, 0, 0.0), (1000, 0, 1.0), (0, 1000, 0.0), (1000, 1000, 2.0)],
    decode=[(1, 1, 0.1), (11, 1, 0.2)],
    transfer=[(0, 0.5), (1000, 1.5)],
    kv_bytes_per_token=1.0,
)
SAMPLE = ROOT / "benchmarks" / "traces" / "mooncake_conversation.csv.gz"


def run(
    arrivals, layout="1P1D", times=TIMES, policy="least-load", late=MappingProxyType({}), **routing
) -> Outcome:
    policies = {role: load_policy(policy, "policy") for role in ROLES.values()}
    steps = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2000)
    setup = Setup(layout, times, policies, RoutingConfig(**routing), steps, **late)
    return simulate(setup, arrivals)


def test_time_jumps_to_the_next_timer() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    assert run_virtually(sleep) == pytest.approx(3600)
    with pytest.raises(RuntimeError, match="never happens"):
        run_virtually(wait_for_ever)


def test_a_request_takes_what_its_parts_take() -> None:
    found = run([Arrival(2.0, 1000, [], output_tokens=5)])
    (one,) = found.answered
    # A second of prefill; then half a second and a second of transfer, and four steps.
    assert one.ttft == pytest.approx(1.0)
    assert one.ended - one.first == pytest.approx(1.5 + 4 * 0.1)
    assert dict(found.gaps) == pytest.approx({0.1: 3, 1.6: 1})


def test_a_chunk_s_kv_moves_while_the_next_chunk_is_computed() -> None:
    chunks = run([Arrival(0.0, 4000, [], output_tokens=2)])
    (one,) = chunks.answered
    # Two steps of 2,000 tokens, the second one behind as many; the first one's KV is moved in it.
    assert one.ttft == pytest.approx(2.0 + 6.0)
    assert one.ended - one.first == pytest.approx(0.5 + 2.0 + 0.1)


def test_a_node_of_both_roles_moves_nothing() -> None:
    (one,) = run([Arrival(0.0, 1000, [], output_tokens=2)], "1B").answered
    assert (one.ttft, one.ended - one.first) == pytest.approx((1.0, 0.1))


def test_a_faster_node_gets_done_sooner() -> None:
    (one,) = run([Arrival(0.0, 1000, [])], "1P@4+1D").answered
    assert one.ttft == pytest.approx(0.25)


def test_cached_blocks_are_not_computed_again_and_are_found_by_the_policy() -> None:
    blocks = [hash_of(0)]
    arrivals = [Arrival(10.0 * i, 1000, blocks, output_tokens=2) for i in range(3)]
    found = run(arrivals, "2P1D", linear(1000), "prefix-aware")
    assert found.hit_ratio == pytest.approx(2 * 512 / 3000)
    assert sorted(each.ttft for each in found.answered) == pytest.approx([0.488, 0.488, 1.0])


def test_the_router_hears_late_of_what_is_cached() -> None:
    arrivals = [Arrival(10.0 * i, 1000, [hash_of(0)], output_tokens=2) for i in range(3)]
    found = run(arrivals, "2P1D", linear(1000), "prefix-aware", {"event_delay": 15.0})
    assert found.hit_ratio == pytest.approx(512 / 3000)


def test_nodes_that_join_take_their_part() -> None:
    arrivals = [Arrival(at, 1000, []) for at in (0.0, 0.0, 10.0, 10.0)]
    late = {"joining": "1P", "join_after": 5.0}
    found = run(arrivals, "1P1D", linear(1000), late=late)
    assert sorted(each.ttft for each in found.answered) == pytest.approx([1.0, 1.0, 1.0, 2.0])
    with pytest.raises(ConfigError, match="write counts and roles"):
        run(arrivals, late={"joining": "1X"})


# ---- one host ----

BUSY = structs.replace(TIMES, prefill_beside=1.5, decode_beside=2.0)


def test_nodes_of_one_host_share_its_cores() -> None:
    """Two prompts of a second each, that three nodes could compute at once."""
    arrivals = [Arrival(0.0, 1000, []), Arrival(0.5, 1000, [])]
    ends = {cores: shared(arrivals, cores, TIMES) for cores in (0, 1, 2)}
    assert ends[0] == ends[2] == pytest.approx([1.0, 1.0])
    # One core: half a second alone, then both at half speed, then the rest of the second alone.
    assert ends[1] == pytest.approx([1.5, 1.5])
    assert shared(arrivals, 1, structs.replace(TIMES, cores=0.5)) == ends[0]


def test_a_node_s_steps_take_longer_beside_others() -> None:
    arrivals = [Arrival(0.0, 1000, []), Arrival(0.5, 1000, [])]
    # 0.5 s alone, the other half in 0.75 s beside the other, which then has half of its own left.
    assert shared(arrivals, 2, BUSY) == pytest.approx([1.25, 0.75 + 0.5])
    assert shared(arrivals[:1], 2, BUSY) == pytest.approx([1.0])
    assert shared(arrivals, 0, BUSY) == pytest.approx([1.0, 1.0]), "each has cores of its own"


def test_a_prompt_beside_them_slows_steps_that_are_computed_as_one() -> None:
    arrivals = [Arrival(0.0, 1000, [], output_tokens=41), Arrival(3.5, 1000, [])]
    found = run(arrivals, times=BUSY, late={"host_cores": 2})
    first = min(found.answered, key=lambda each: each.arrived)
    # 40 steps of 0.1 s from 2.5 s on, the prompt beside them from 3.5 to 5.0 s.
    assert first.ended == pytest.approx(2.5 + 4.0 + 1.5 / 2)
    assert sum(count for _, count in found.gaps) == 40


def test_the_cores_of_gpus_are_not_shared() -> None:
    with pytest.raises(ConfigError, match="--host-cores: the calibration is of GPUs"):
        shared([Arrival(0.0, 1000, [])], 2, structs.replace(TIMES, cores=0))


def shared(arrivals, cores: int, times: Calibration) -> list[float]:
    """Returns the seconds to each first token, on prefill nodes of a host with so many cores."""
    found = run(arrivals, "3P1D", times, late={"host_cores": cores})
    return [each.ttft for each in sorted(found.answered, key=lambda each: each.arrived)]


# ---- caches and the queue ----


def test_prompts_without_hashes_share_nothing() -> None:
    assert run([Arrival(5.0 * i, 1000, []) for i in range(3)]).hit_ratio == 0


def test_steps_that_are_computed_as_one_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = [replace(each, time=each.time / 4) for each in read_trace(SAMPLE, 120)]
    times = linear(50_000)
    one = run(arrivals, "2P2D", times)
    monkeypatch.setattr(engine, "MOST_STEPS", 1)
    other = run(arrivals, "2P2D", times)
    ours, theirs = ([(e.arrived, e.first, e.ended) for e in o.answered] for o in (one, other))
    for a, b in zip(sorted(ours), sorted(theirs), strict=True):
        assert a == pytest.approx(b, abs=0.05)
    for found in (one, other):
        assert sum(n for _, n in found.gaps) == sum(e.output_tokens - 1 for e in arrivals)


def test_sequences_that_outgrow_the_memory_are_preempted_and_end() -> None:
    policies = {role: load_policy("least-load", "policy") for role in ROLES.values()}
    steps = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2000)
    setup = Setup("1P1D", linear(10_000), policies, RoutingConfig(), steps, num_blocks=20)
    found = simulate(setup, [Arrival(i / 10, 500, [], output_tokens=3000) for i in range(8)])
    assert len(found.answered) == 8
    assert sum(count for _, count in found.gaps) == 8 * 2999


def test_the_next_turn_is_computed_by_the_node_that_has_most_of_it() -> None:
    blocks = [hash_of(number) for number in range(4)]
    turns = [Arrival(30.0 * i, (2 + i) * 512, blocks[: 2 + i], output_tokens=2) for i in range(3)]
    found = run(turns, policy="prefix-aware", local_prefill_threshold=600)
    waits = [each.ended - each.first for each in sorted(found.answered, key=lambda e: e.arrived)]
    assert waits[0] > 0.6, "a transfer and a step"
    assert waits[1:] == pytest.approx([0.1, 0.1])


def test_the_queue_s_limits_refuse() -> None:
    arrivals = [Arrival(0.0, 1000, []) for _ in range(10)]
    found = run(arrivals, max_concurrent_requests=1, max_queued_requests=3, max_client_share=1)
    assert found.refused == {"OVERLOADED": 6} and len(found.answered) == 4
    row = found.row(slo_ttft=2.5)
    assert (row["requests"], row["refused"], row["good"]) == (10, 6, 0.1)


def test_an_slo_refuses_what_would_be_late() -> None:
    """A prompt takes 0.1 s; they come twice as fast."""
    arrivals = [Arrival(0.05 * i, 1000, [], output_tokens=2) for i in range(200)]
    late = run(arrivals, times=linear(10_000))
    kept = run(arrivals, times=linear(10_000), slo_ttft=1.0)
    assert set(kept.refused) == {"SLO_TTFT"} and not late.refused
    assert kept.good(1.0, 0.0) > 3 * late.good(1.0, 0.0)
    assert kept.good(1.0, 0.0) > 0.9 * len(kept.answered)


def test_one_session_of_unrelated_prompts_does_not_herd() -> None:
    """A client may give all its requests the same X-Session-Id."""
    arrivals = [
        Arrival(number / 2, 1024, [hash_of(2 * number), hash_of(2 * number + 1)], 5, "same")
        for number in range(90)
    ]
    found = run(arrivals, "3P3D", linear(1000), "cost")
    assert found.imbalance < 1.1 and max(each.ttft for each in found.answered) < 1.5


def test_one_system_prompt_is_shared_by_all_nodes() -> None:
    found = run(shared_prompt(300, 20.0), "3P1D", linear(10_000), "prefix-aware")
    assert found.imbalance < 1.1 and found.hit_ratio > 0.7


# ---- tables ----


def test_tables_are_linear_between_their_points_and_beyond() -> None:
    grid = Grid([(0, 0, 0.0), (10, 0, 10.0), (0, 10, 5.0), (10, 10, 25.0)])
    assert [grid(5, 0), grid(5, 5), grid(20, 0), grid(10, 20)] == [5, 10, 20, 40]
    times = Times(TIMES)
    assert times.step(Work(chunk_tokens=500, chunk_cached=500 * 1000)) == pytest.approx(1.0)
    assert times.step(Work(sequences=6, context=60)) == pytest.approx(0.15)
    both = Work(chunk_tokens=494, sequences=6, context=60)
    assert times.step(both) == pytest.approx(0.5)
    assert Times(TIMES, 2.0).step(Work(sequences=1, context=1)) == pytest.approx(0.05)
    assert weighted_percentile([(1.0, 98), (2.0, 2)], 0.99) == 2.0


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    TIMES.write(tmp_path / "it.json")
    assert read_calibration(tmp_path / "it.json") == TIMES


class TimedLLM:
    """Answers with the timeline of a cluster that computes a token in a millisecond. Its nodes are
    slower while both compute; a long answer lasts until the fourth prompt beside it."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._beside = Semaphore(0)
        self._both = False

    def generate(self, prompt, params, use_tqdm):
        tokens = prompt["prompt_token_ids"]
        begun = [each for each in self.prompts if tokens[: len(each)] == each]
        known = max((len(each) for each in begun if len(each) > 1), default=0)  # not by chance
        self.prompts.append(tokens)
        long = params.max_tokens > LONG
        if long:
            for _ in range(4):
                self._beside.acquire()
        elif len(tokens) == 1:  # a turn begins
            self._both = False
        elif self._both:
            self._beside.release()
        slower = 2 if self._both else 1
        self._both = self._both or (params.n == 4 and params.max_tokens == LONG)  # the last alone
        new, step = len(tokens) - known, params.n * (0.03 if long else 0.01)
        first = slower * (0.25 + new / 1000)
        landed = first + slower * (0.1 + new / 10_000)
        timeline = {
            "queued": 0.01,
            "reserved": 0.01 + slower * 0.05,
            "prefill_queue_seconds": 0.0,
            "prefill_seconds": slower * new / 1000,
            "first_token": first,
            "transferred": landed,
            "finished": landed + 0.002 + (params.max_tokens - 1) * step,
            "transfer_bytes": 12 * new,
            "decode_cached_tokens": known,
            "migrations": 0,
        }
        return [SimpleNamespace(timeline=timeline, prompt_token_ids=tokens)]


def test_calibration_finds_what_a_cluster_takes() -> None:
    config = CalibrateConfig(
        chunk="10,100", cached="0,64", batch="1,4", context="16", cpu_threads=3
    )
    found = measure(TimedLLM(), Points(config), config)  # type: ignore[arg-type]
    assert found.kv_bytes_per_token == 12 and found.router_s == pytest.approx(0.2)
    assert found.reserve_s == pytest.approx(0.05)
    assert found.answer_s == pytest.approx(0.002) and found.cores == 3
    assert (found.prefill_beside, found.decode_beside) == pytest.approx((2.0, 3.0), rel=0.02)
    for beside in (found.router_beside, found.reserve_beside, found.transfer_beside):
        assert beside == pytest.approx(2.0)
    assert {*found.scatter.prefill, *found.scatter.decode} == {1.0}, "all measurements are alike"
    assert found.prefill == [
        (10, 0, pytest.approx(0.01)), (10, 64, pytest.approx(0.01)),
        (100, 0, pytest.approx(0.1)), (100, 64, pytest.approx(0.1)),
    ]  # fmt: skip
    assert found.decode == [(1, 16, pytest.approx(0.01)), (4, 16, pytest.approx(0.04))]
    times = Times(found)
    assert times.hand_over == pytest.approx(0.1) and times.move(50) == pytest.approx(0.005)


@pytest.mark.slow
def test_a_real_cluster_is_measured_and_simulated(tmp_path: Path, capsys) -> None:
    file = str(tmp_path / "calibration.json")
    flags = ["--model", str(MODELS / "llama-gqa"), "--dtype", "float32", "--cpu-threads", "1"]
    points = ["--batch", "1,2", "--context", "32", "--chunk", "16,64", "--cached", "0,64"]
    assert main(["calibrate", "--output", file, "--repetitions", "1", *flags, *points]) == 0
    assert main(["simulate", "--trace", str(SAMPLE), "--calibration", file]) == 0
    assert "1P1D" in capsys.readouterr().out


# ---- traces ----


def test_all_forms_of_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,396,0\n"
    )
    assert [(each.time, each.num_tokens, each.output_tokens) for each in read_trace(azure)] == [
        (0.0, 374, 44), (0.5, 396, 1),
    ]  # fmt: skip
    ours = tmp_path / "ours.jsonl"
    ours.write_text('{"time": 3, "input_length": 9, "output_length": 2, "session": "s"}\n\n')
    assert read_trace(ours) == [Arrival(0.0, 9, [], 2, "s")]


def test_cut_and_huge_traces_are_named(tmp_path: Path) -> None:
    head = b"timestamp,input_length,output_length,hash_ids\n0,600,5,"
    cut, huge = gzip.compress(head + b"0\n")[:-9], gzip.compress(head + b"0-99999999999\n")
    for data, fault in ((cut, "EOFError"), (huge, "hash_ids")):
        path = tmp_path / "a.csv.gz"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"--trace .*{fault}"):
            read_trace(path)


def test_idle_years_between_requests_take_no_time() -> None:
    def lasting(years: float) -> Outcome:
        return run([Arrival(0.0, 100, [], 50), Arrival(years * 3e7, 100, [], 50)])

    began = time.process_time()
    long, short = ([each.ttft for each in lasting(years).answered] for years in (30, 0.001))
    assert long == pytest.approx(short)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.txt", "", "it must end in"),
        ("a.jsonl", "", "no requests"),
        ("a.jsonl", "{", "request 1"),
        ("a.jsonl", '{"input_length": 1, "output_length": 1}', "either timestamp"),
        ("a.jsonl", '{"time": 1e99, "input_length": 1, "output_length": 1}', "out of range"),
        ("a.jsonl", '{"time": 1, "input_length": 0, "output_length": 1}', "out of range"),
        ("a.csv", "x,y\n1,2\n", "TIMESTAMP"),
        ("a.csv.gz", "no gzip", "request 1"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--trace .*{fault}"):
        read_trace(path)


# ---- the command ----


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys) -> None:
    TIMES.write(tmp_path / "times.json")
    out = tmp_path / "out.json"
    flags = ["--trace", str(SAMPLE), "--calibration", str(tmp_path / "times.json")]
    assert main(["simulate", *flags, "--requests=20", "--layout=2P1D", f"--json={out}"]) == 0
    row = json.loads(out.read_text())
    assert row["requests"] == 20 and row["layout"] == "2P1D"
    assert "| 2P1D | cost |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        ("--layout=2P", "prefill and decode nodes"),
        ("--layout=2P3X", "write counts and roles"),
        ("--layout=1P1D@0", "none of speed 0"),
        ("--layout=9999B", "at most 512"),
        (f"--layout={'9' * 5000}B", "write counts and roles"),
        ("--kv-cache-tokens=999999999999999", "at most 10000000 blocks"),
        ("--skip=999999", "no more requests"),
        ("--kv-cache-tokens=1000", "the longest request"),
        ("--prefill-policy=best", "best"),
        ("--calibration=absent.json", "make one with"),
        ("--trace=absent.jsonl", "absent.jsonl"),
        ("--json=/absent/it.json", "folder does not exist"),
    ],
)
def test_bad_options_are_one_sentence(flag: str, fault: str, tmp_path: Path, capsys) -> None:
    TIMES.write(tmp_path / "times.json")
    flags = ["--trace", str(SAMPLE), "--calibration", str(tmp_path / "times.json"), "--requests=9"]
    assert main(["simulate", *flags, flag]) == 2
    told = capsys.readouterr().err
    assert fault in told and told.count("\n") == 1


def test_tables_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for changes in (
        {"decode": []},
        {"transfer": []},
        {"prefill": [(1, 0, -1.0)]},
        {"decode": [(1, 1, 1e9)]},
        {"router_s": -1.0},
        {"answer_s": 1e300},
        {"kv_bytes_per_token": -1.0},
    ):
        replaced = {field: getattr(TIMES, field) for field in TIMES.__struct_fields__} | changes
        Calibration(**replaced).write(tmp_path / "bad.json")
        with pytest.raises(ConfigError, match="pdserve calibrate"):
            read_calibration(tmp_path / "bad.json")


def test_layouts_name_a_role_and_a_speed_for_each_node() -> None:
    assert read_layout("1P+1P@0.5+2D") == [(1, 1.0), (1, 0.5), (2, 1.0), (2, 1.0)]
