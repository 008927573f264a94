"""`benchmarks/bench_router.py`: a router of one and of two workers, with a few simulated nodes, and
beside others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT


@pytest.mark.slow
def test_it_says_what_tokens_and_nodes_cost_the_router(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    command = [sys.executable, "benchmarks/bench_router.py", "--nodes", "24", "--seconds", "1"]
    ended = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    assert "24 idle nodes" in ended.stdout and "placement, in process, CPU time" in ended.stdout
    result = json.loads(file.read_text())
    one, two = result["tokens"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert two["least_share_of_a_worker"] > 0, "both serve"
    assert all(each["tokens_per_s"] > 0 and each["us_per_token"] > 0 for each in (one, two))
    assert result["fleet"]["nodes"] == 24 and result["fleet"]["cores"] >= 0  # counted in ticks


@pytest.mark.slow
def test_it_compares_routers_in_turns(tmp_path: Path) -> None:
    file = tmp_path / "routers.json"
    command = [sys.executable, "benchmarks/bench_router.py", "--workers", "", "--nodes", "0"]
    command += ["--against", str(ROOT), "--peers-python", sys.executable]
    command += ["--policies", "least-load,cost"]
    command += ["--clients", "4", "--seconds", "1", "--rounds", "1", "--json", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "smg is not installed there" in ended.stderr
    result = json.loads(file.read_text())
    (before,), (after,) = result["against"]["before"], result["against"]["after"]
    assert all(each["ms_per_request"] > 0 for (each,) in result["policies"].values())
    (ours,), (none,) = result["peers"]["pdserve"], result["peers"]["no router"]
    assert all(each["ms_per_request"] > 0 for each in (before, after, ours))
    assert none["ms_per_request"] == 0 and none["first_token_ms"] > 0
