"""The log of `pdserve up --log-format json`, with all its processes."""

from __future__ import annotations

import json

from cluster import Cluster
from paths import MODELS


def test_all_processes_of_a_cluster_write_json() -> None:
    with Cluster(MODELS / "llama-gqa", log_format="json", num_gpu_blocks_override=64) as cluster:
        cluster.complete("One day", max_tokens=2)
        cluster.stop()
        found = [json.loads(line) for line in cluster.log().splitlines()]
    processes = {each["process"] for each in found}
    assert {"up", "router"} < processes and len(processes) == 4, processes
    own = [each for each in found if each["process"] == "up"]
    assert any("cluster ready" in each["message"] for each in own)
    assert {each["level"] for each in own} == {"info"}
