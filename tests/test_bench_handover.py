"""`benchmarks/bench_handover.py`: stations of a hand-off, in either order of data and commit."""

from __future__ import annotations

import pytest

from benchmarks.bench_handover import STATIONS, stations

LINE = {
    "queued": 0.001, "reserved": 0.003, "first_token": 0.010, "transferred": 0.014,
    "finished": 0.1, "prefill_queue_seconds": 0.001, "prefill_seconds": 0.004,
    "data_seconds": 0.008, "commit_seconds": 0.008, "verify_seconds": 0.001,
    "transfer_seconds": 0.005,
}  # fmt: skip


@pytest.mark.parametrize(("data", "commit"), [(0.008, 0.006), (0.006, 0.008)])
def test_no_station_is_negative_whether_data_or_commit_is_first(data: float, commit: float) -> None:
    found = stations([{**LINE, "data_seconds": data, "commit_seconds": commit}])
    assert found.keys() == STATIONS.keys()
    assert all(value >= 0 for quantiles in found.values() for value in quantiles.values())
    late = found["  committed, without data"], found["  data in place, uncommitted"]
    expected = [max(0.0, data - commit), max(0.0, commit - data)]
    assert [each["p50"] for each in late] == pytest.approx([1e3 * each for each in expected])
