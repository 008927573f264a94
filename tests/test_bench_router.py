"""`benchmarks/bench_router.py`: a router of one and of two workers, with a few simulated nodes."""

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
    command += ["--against", str(ROOT), "--rounds", "1"]
    ended = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    assert "24 idle nodes" in ended.stdout and "placement, in process, CPU time" in ended.stdout
    result = json.loads(file.read_text())
    for side in "before", "after":
        (measured,) = result["against"][side]
        assert measured["ms_per_request"] > 0
    one, two = result["tokens"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert two["least_share_of_a_worker"] > 0, "both serve"
    assert all(each["tokens_per_s"] > 0 and each["us_per_token"] > 0 for each in (one, two))
    assert result["fleet"]["nodes"] == 24 and result["fleet"]["cores"] > 0
