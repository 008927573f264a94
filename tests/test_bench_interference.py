"""`benchmarks/bench_interference.py`: both shapes of a real cluster, under a small load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paths import MODELS, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_interference

SMALL = ["--streams", "2", "--input-len", "8", "--output-len", "12", "--every", "0.05"]


@pytest.mark.slow
def test_both_shapes_are_measured_under_the_same_load(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    options = "--cpu-threads 1 --num-gpu-blocks-override 192"
    argv = [
        *(*SMALL, "--long-len", "40", "90", "--long-prompts", "2", "--rounds", "1"),
        *("--model", str(MODELS / "llama-gqa"), "--dtype", "float32", "--no-peers"),
        *("--pdserve", f"apart={options}", "--pdserve", f"in one=--both 1 {options}"),
        *("--logs", str(tmp_path / "logs"), "--json", str(result)),
    ]
    assert bench_interference.main(argv) == 0
    medians = json.loads(result.read_text())["medians"]
    assert len(medians) == 2
    for servers in medians.values():
        assert servers.keys() == {"pdserve apart", "pdserve in one"}
        for metrics in servers.values():
            assert metrics["output_tokens"] == 12 and metrics["tok_s"] > 0
            assert metrics["itl_p99"] >= metrics["itl_p50"] > 0 and metrics["long_ttft_p50"] > 0
