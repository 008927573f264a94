"""The comparison of simulated with live clusters: a kept run is simulated anew, and misses are
counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.bench_simulated_live import COLD, WARM_AFTER, Run, made, main, stages_of
from pdserve.common.config.router import RoutingConfig
from pdserve.router.cluster.placement import load_policies
from pdserve.simulate.calibration import linear
from pdserve.simulate.cluster import Setup, simulate


def kept(path: Path, slower: float) -> Path:
    """Writes a run whose answers took `slower` times as long as predicted."""
    times = linear(1000)
    setup = Setup("2P1D", times, load_policies(RoutingConfig()), block_size=16, host_cores=2)
    found = simulate(setup, [each.arrival for each in made(9, 2.0)]).answered
    answers = [
        replace(each, first=each.arrived + slower * each.ttft, ended=each.ended + 9 * (slower - 1))
        for each in found
    ]
    runs = msgspec.to_builtins([Run("2P1D", 2, 9, 2.0, times, answers)])
    path.write_text(json.dumps({"runs": runs}))
    return path


@pytest.mark.parametrize(("slower", "missed"), [(1.0, 0), (2.0, 4)])
def test_a_kept_run_is_simulated_anew(
    slower: float, missed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["--again", str(kept(tmp_path / "run.json", slower)), "--json", str(out)]) == 0
    assert f"{missed} of 4" in capsys.readouterr().out
    assert main(["--again", str(out)]) == 0, "what it writes can be simulated again, too"


def test_the_first_prompts_come_at_once_and_do_not_count() -> None:
    times = [each.time for each in made(5, 1.0)]
    assert times[:COLD] == [0.0] * COLD and min(times[COLD:]) >= WARM_AFTER


def test_the_median_of_each_stage_is_kept() -> None:
    def line(**stages: float) -> dict[str, object]:
        return {"stages": [{"name": name, "seconds": seconds} for name, seconds in stages.items()]}

    lines = [line(queue=1.0, decode=5.0), line(queue=3.0), line(queue=2.0, decode=4.0)]
    assert stages_of(lines) == {"queue": 2.0, "decode": 4.0}
