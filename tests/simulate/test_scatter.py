"""Scatter: `calibrate` keeps how far measurements were from their medians, and `simulate` draws
from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from pdserve.cli.main import main
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.core.errors import ConfigError
from pdserve.router.cluster.policies import load_policy
from pdserve.simulate.calibrate import Samples, calibration
from pdserve.simulate.calibration import Calibration, Scatter, drawn, read_calibration
from pdserve.simulate.cluster import ROLES, Setup, simulate
from pdserve.simulate.outcome import Answered
from pdserve.simulate.workloads import Arrival

TIMES = Calibration(
    model="m",
    device="d",
    prefill=[(0, 0, 0.0), (1000, 0, 1.0)],
    decode=[(1, 1, 0.1)],
    transfer=[(0, 0.5)],
    kv_bytes_per_token=1.0,
    router_s=0.2,
    reserve_s=0.1,
)
ONE = [Arrival(0.0, 1000, [], output_tokens=5)]
MANY = [Arrival(1.5 * number, 1000, [], output_tokens=9) for number in range(20)]


def answers(
    times: Calibration, arrivals=ONE, seed: int = 0, layout="1P1D", cores=0
) -> list[Answered]:
    """Returns the answers in the order of their arrivals."""
    policies = {role: load_policy("least-load", "policy") for role in ROLES.values()}
    setup = Setup(layout, times, policies, RoutingConfig(), seed=seed, host_cores=cores)
    found = simulate(setup, arrivals).answered
    return sorted(found, key=lambda each: each.arrived)


def scattered(**quantiles: list[float]) -> Calibration:
    return structs.replace(TIMES, scatter=Scatter(**quantiles))


@pytest.mark.parametrize(
    ("kind", "ttft", "rest"),
    [
        ("prefill", 2.3, 0.9),
        ("decode", 1.3, 1.3),
        ("transfer", 1.3, 1.4),
        ("router", 1.5, 0.9),
        ("reserve", 1.4, 0.9),
        ("prefill_beside", 1.3, 0.9),
        ("decode_beside", 1.3, 0.9),
    ],
)
def test_each_part_is_drawn_from_its_own_quantiles(kind: str, ttft: float, rest: float) -> None:
    """Each part takes twice its median: a second of prefill, 0.2 s of router, 0.1 s of reserving,
    then 0.5 s of transfer and 4 steps of 0.1 s. Alone, nothing is drawn from `_beside`."""
    (one,) = answers(scattered(**{kind: [2.0]}))
    assert (one.ttft, one.ended - one.first) == pytest.approx((ttft, rest))


def test_the_same_seed_gives_the_same_answers() -> None:
    times = scattered(prefill=[0.8, 1.0, 2.0], decode=[0.9, 1.1], transfer=[0.5, 3.0])
    assert answers(times, MANY, seed=7) == answers(times, MANY, seed=7)
    assert answers(times, MANY, seed=7) != answers(times, MANY, seed=8)
    assert answers(TIMES, MANY, seed=7) == answers(TIMES, MANY, seed=8), "nothing is drawn"


def test_draws_lie_between_the_least_and_the_most() -> None:
    found = answers(scattered(prefill=[0.5, 1.0, 1.5]), MANY, layout="4P1D")
    ttft = [each.ttft - 0.3 for each in found]
    assert 0.5 <= min(ttft) < 0.75 and 1.25 < max(ttft) <= 1.5


def test_steps_beside_others_have_quantiles_of_their_own() -> None:
    """Two prompts on two prefill nodes, at once: each is beside the other all the time."""
    times = structs.replace(
        TIMES, prefill_beside=1.5, scatter=Scatter(prefill=[2.0], prefill_beside=[3.0])
    )
    both = answers(times, [ONE[0], ONE[0]], layout="2P1D", cores=2)
    assert [each.ttft for each in both] == pytest.approx([1.5 * 3 + 0.3] * 2)
    (alone,) = answers(times, layout="2P1D", cores=2)
    assert alone.ttft == pytest.approx(2.0 + 0.3)


def test_the_work_around_steps_takes_longer_while_the_decode_node_computes() -> None:
    times = structs.replace(TIMES, router_beside=2.0, reserve_beside=3.0, transfer_beside=4.0)
    busy = [Arrival(0.0, 1000, [], output_tokens=100), Arrival(3.0, 1000, [], output_tokens=2)]
    first, second = answers(times, busy)
    assert first.ttft == pytest.approx(1.3), "the decode node was idle"
    assert second.ttft == pytest.approx(1.0 + 2 * 0.2 + 3 * 0.1)
    # 4 × 0.5 s of transfer, then up to a step until the next one, and a step.
    assert 2.1 - 1e-6 <= second.ended - second.first <= 2.2


def test_quantiles_are_interpolated() -> None:
    assert drawn([], 0.3) == 1.0 and drawn([2.0], 0.3) == 2.0
    assert [drawn([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 0.75, 1)] == [
        1.0, 1.5, 2.0, 3.0, 4.0,
    ]  # fmt: skip


# ---- calibrate ----


def turn(slower: float) -> Samples:
    """A turn whose durations are `slower` times the median ones."""
    of: dict[tuple[object, ...], float] = {
        ("prefill", 100, 0): 0.1, ("decode", 1, 16): 0.01, ("long", 1, 16): 0.2,
        ("short", 1, 16): 0.05, ("transfer", 1000): 0.005, ("router",): 0.004, ("reserve",): 0.003,
        ("prefill beside", 100, 0): 0.15, ("decode beside", 1, 16): 0.02,
        ("transfer beside", 1000): 0.01,
        ("router beside",): 0.006, ("reserve beside",): 0.012, ("kv_bytes_per_token",): 10.0,
    }  # fmt: skip
    return {name: [seconds * slower] for name, seconds in of.items()}


def test_calibration_keeps_the_scatter_of_its_measurements() -> None:
    turns = [turn(slower) for slower in (1.0, 4.0, 0.5)]
    found = calibration(turns, CalibrateConfig(cpu_threads=1))
    for quantiles in structs.asdict(found.scatter).values():
        assert quantiles[0] == 0.5 and quantiles[-1] == 4.0
        assert quantiles == sorted(quantiles) and drawn(quantiles, 0.5) == 1.0
    assert (found.router_beside, found.reserve_beside) == pytest.approx((1.5, 4.0))
    assert found.transfer_beside == pytest.approx(2.0)


def test_nodes_of_both_roles_are_calibrated_without_a_hand_off() -> None:
    names = {"prefill", "decode", "long", "short", "router"}
    found = calibration(
        [{name: seconds for name, seconds in turn(1.0).items() if name[0] in names}],
        CalibrateConfig(cpu_threads=1),
    )
    assert found.transfer == [(0, 0.0)] and found.reserve_s == found.kv_bytes_per_token == 0
    assert found.prefill_beside == found.decode_beside == 1.0
    (answer,) = answers(found, [Arrival(0.0, 100, [], 5)], layout="1B", cores=1)
    assert answer.ttft == pytest.approx(0.1 + found.router_s)


def test_the_file_keeps_scatter_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    times = scattered(prefill=[0.9, 1.2])
    times.write(path)
    assert read_calibration(path) == times
    scattered(prefill=[0.0, 1.2]).write(path)
    with pytest.raises(ConfigError, match="scatter"):
        read_calibration(path)
    structs.replace(TIMES, reserve_beside=0.5).write(path)
    with pytest.raises(ConfigError, match="reserve_beside"):
        read_calibration(path)


def test_the_command_has_a_seed(tmp_path: Path, capsys) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "times.json"
    trace.write_text('{"time": 0, "input_length": 100, "output_length": 9}\n' * 20)
    scattered(prefill=[0.5, 2.0], decode=[0.5, 2.0]).write(path)
    printed = []
    for seed in (1, 1, 2):
        flags = ["--trace", str(trace), "--calibration", str(path), f"--seed={seed}"]
        assert main(["simulate", *flags]) == 0
        printed.append(capsys.readouterr().out.rpartition("|")[0].rpartition("|")[0])
    assert printed[0] == printed[1] != printed[2]
