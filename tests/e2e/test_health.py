"""Health that means it: red while no token could be produced, green again without help."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import grpc
import psutil
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc

import reference
from cluster import node_metrics, text_of
from thinned import slow
from warm import WarmCluster, ranks_of, slowness, suspended

MODEL = "mistral"
PROMPT = "Once upon a time there was a girl who lived in an old mill"
NUM_TOKENS = 24
LONG = 250  # tokens, about a second
STALL = 3.0 * slowness()  # seconds; on a busy machine a step may take some


def is_ready(address: str) -> tuple[bool, str]:
    """Returns what `/ready` says: the status and the reason."""
    response = requests.get(f"http://{address}/ready", timeout=60)
    return response.status_code == 200, response.json()["reason"]


def serves(address: str) -> bool:
    """Returns what the standard gRPC health service says."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.Decode")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def node(cluster: WarmCluster) -> dict[str, Any]:
    (found,) = cluster.nodes("decode")
    return found


def expected(cluster: WarmCluster, num_tokens: int) -> str:
    ids = tuple(reference.encode(cluster.model, PROMPT))
    return reference.decode(cluster.model, reference.greedy(cluster.model, ids, num_tokens))


def complete(cluster: WarmCluster) -> str:
    answer = cluster.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    return str(answer["choices"][0]["text"])


@pytest.fixture(scope="module", params=[{}, slow({"async_scheduling": ""})], ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[WarmCluster]:
    options = {"router": {"heartbeat_timeout": 30}, "kv_lease": 30}  # longer than it stands still
    with WarmCluster(MODEL, 1, 0, **options) as cluster:
        stall = {"engine_stall_timeout": STALL, **request.param}
        cluster.start_node("decode", tensor_parallel_size=2, **stall)
        cluster.wait_nodes()
        yield cluster


def rank_of(cluster: WarmCluster, number: int) -> psutil.Process:
    (decode,) = cluster.names("decode")
    return ranks_of(cluster.pids[decode])[number]


def check_red(cluster: WarmCluster, cause: str, since: float) -> None:
    """Everybody who asks hears the reason, in time (`since` then the rank may have stood still);
    what it may touch stays held."""
    decode = node(cluster)
    cluster.wait_for(lambda: cause in is_ready(decode["metrics_address"])[1])
    assert time.monotonic() - since > STALL / 2
    cluster.wait_for(lambda: not serves(decode["address"]))
    cluster.wait_for(lambda: node(cluster)["state"] == "unhealthy")
    ready = cluster.get("/ready")
    assert ready.status_code == 503 and cause in ready.json()["error"]["message"]
    metrics = node_metrics(decode)
    assert metrics["pdserve_healthy"] == 0
    assert metrics["pdserve_kv_blocks_free"] < metrics["pdserve_kv_blocks"]


def check_green(cluster: WarmCluster, node_id: str) -> None:
    """The same node serves again, and rightly."""
    cluster.wait_ready()
    decode = node(cluster)
    assert decode["node_id"] == node_id
    cluster.wait_for(lambda: is_ready(decode["metrics_address"]) == (True, "ok"))
    cluster.wait_for(lambda: serves(decode["address"]))
    assert complete(cluster) == expected(cluster, NUM_TOKENS)
    cluster.wait_idle()
    cluster.wait_for(lambda: node_metrics(decode)["pdserve_healthy"] == 1)


def check_said(cluster: WarmCluster, cause: str) -> None:
    """The log has each change once. On a host that stands still there may be some more."""
    said = re.findall(r" (unhealthy|healthy again): (\S+ \S+|\S+)", cluster.log())
    assert [state for state, _ in said] == ["unhealthy", "healthy again"] * (len(said) // 2), said
    assert any(reason.startswith(cause) for _, reason in said), said


def test_a_rank_that_answers_nothing(cluster: WarmCluster) -> None:
    node_id = node(cluster)["node_id"]
    with ThreadPoolExecutor(1) as pool:
        since = time.monotonic()
        with suspended(rank_of(cluster, 1)):
            answer = pool.submit(complete, cluster)
            check_red(cluster, "rank 1 has not answered a call for", since)
        assert answer.result() == expected(cluster, NUM_TOKENS)
    check_green(cluster, node_id)
    check_said(cluster, "rank 1")


def test_a_step_that_does_not_return(cluster: WarmCluster) -> None:
    node_id, rank, at_work = node(cluster)["node_id"], rank_of(cluster, 0), False
    while not at_work:  # the answer may be over before the rank stands still
        stream = cluster.stream(PROMPT, max_tokens=LONG, ignore_eos=True)
        begin = list(islice(stream, 3))
        since = time.monotonic()
        with suspended(rank):
            if at_work := node_metrics(node(cluster))["pdserve_num_requests_running"] > 0:
                check_red(cluster, "has been running for", since)
        assert text_of(iter(begin)) + text_of(stream) == expected(cluster, LONG)
    check_green(cluster, node_id)
    check_said(cluster, "step")


def test_an_idle_rank_that_stands_still_is_noticed_and_given_up(cluster: WarmCluster) -> None:
    """No request has to find out, and the node ends, so that its supervisor restarts it."""
    cluster.wait_idle()
    (name,) = cluster.names("decode")
    decode = psutil.Process(cluster.pids[name])
    with suspended(rank_of(cluster, 1)):
        cluster.wait_for(lambda: "rank 1 has not answered a call" in cluster.get("/ready").text)
        decode.wait(timeout=60 * STALL)
    assert "rank 1 has not answered a call" in (log := cluster.log())
    assert "the node ends" in log
