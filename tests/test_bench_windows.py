"""`benchmarks/bench_windows.py`: what a sequence holds of a window does not grow with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_windows


@pytest.mark.slow
def test_a_window_holds_the_same_at_every_context(tmp_path: Path) -> None:
    small = ["--window", "32", "--contexts", "128,1024", "--sequences", "2", "--chunk", "16"]
    bench_windows.main([*small, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    held = {(each["window"], each["context"]): each["kv"] for each in found}
    assert held[32, 1024] == held[32, 128] < held[None, 128] == held[None, 1024] / 8
    assert all(each["decode"] > 0 and each["chunk"] > 0 for each in found)
