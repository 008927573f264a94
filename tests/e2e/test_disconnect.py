"""Clients that leave, and a network that fails: whatever happens, every block comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import reference
from callers import KINDS, call, fresh_prompt, storm
from cluster import Cluster, ended, node_metrics, text_of
from warm import IMPORTS, WarmCluster, shared

MODEL = "llama-gqa"
DELAY = 0.1  # seconds before a run of blocks is delivered; a run is at most 64 tokens
PLACES = 12
NUM_TOKENS = 12


def slow(**config: Any) -> dict[str, Any]:
    """Options of a cluster whose KV travels with tests/helpers/slow_connector.py."""
    return {
        "kv_connector": "slow_connector:SlowTCP",
        "kv_connector_config": json.dumps(config),
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    routing = {"max_concurrent_requests": PLACES, "max_client_share": 1}  # one client asks it all
    options = {"num_gpu_blocks_override": 512, **routing}
    with Cluster(MODEL, IMPORTS, **options, **slow(delay=DELAY)) as cluster:
        yield cluster


def load(cluster: Cluster, role: str, name: str) -> float:
    (node,) = cluster.nodes(role)
    return node_metrics(node)[f"pdserve_{name}"]


def prefilling(cluster: Cluster) -> bool:
    return (
        load(cluster, "prefill", "num_requests_running") > 0
        and load(cluster, "decode", "num_requests_remote") > 0
    )


def transferring(cluster: Cluster) -> bool:
    """Every prompt is computed, and its KV not yet there."""
    return (
        load(cluster, "prefill", "num_requests_running") == 0
        and load(cluster, "prefill", "num_requests_waiting") == 0
        and load(cluster, "decode", "num_requests_remote") > 0
        and load(cluster, "prefill", "kv_blocks_free") < 512
    )


def decoding(cluster: Cluster) -> bool:
    return load(cluster, "decode", "num_requests_running") > 0


def is_quiet(cluster: Cluster) -> bool:
    """The router serves nobody and has nobody on a node."""
    state = cluster.get("/v1/cluster").json()
    placed = sum(node["in_flight"] for node in state["nodes"])
    return bool((state["running"], state["waiting"], placed) == (0, 0, 0))


def check_idle_and_exact(cluster: Cluster) -> None:
    """Nothing is held or counted any more, and the next answer is right."""
    cluster.wait_for(lambda: is_quiet(cluster))  # the last hang-up may be on its way
    cluster.wait_idle(5)
    assert all(node["breaker"] == "closed" for node in cluster.nodes())
    prompt = fresh_prompt(40)
    answer = cluster.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = reference.greedy(cluster.model, tuple(prompt), NUM_TOKENS)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)
    cluster.wait_idle(5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "num_callers", "num_prompt_tokens"),
    [(prefilling, 8, 900), (transferring, 1, 300), (decoding, 2, 20)],
)
def test_hanging_up(
    cluster: Cluster, kind: str, stage: Any, num_callers: int, num_prompt_tokens: int
) -> None:
    max_tokens = 1000 - num_prompt_tokens
    callers = [call(cluster, kind, num_prompt_tokens, max_tokens) for _ in range(num_callers)]
    cluster.wait_for(lambda: stage(cluster))
    for caller in callers:
        caller.hang_up()
    check_idle_and_exact(cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_hanging_up_in_the_queue(cluster: Cluster, kind: str) -> None:
    served = [call(cluster, "streamed", 64, 900) for _ in range(PLACES)]
    cluster.wait_for(lambda: cluster.get("/v1/cluster").json()["running"] == PLACES)
    queued = [call(cluster, kind, 100, 10) for _ in range(3)]
    cluster.wait_for(lambda: cluster.get("/v1/cluster").json()["waiting"] == 3)
    for caller in queued:
        caller.hang_up()
    cluster.wait_for(lambda: cluster.get("/v1/cluster").json()["waiting"] == 0)
    for caller in served:
        caller.hang_up()
    check_idle_and_exact(cluster)


def test_a_storm_of_hang_ups(cluster: Cluster) -> None:
    storm(cluster, 40)
    check_idle_and_exact(cluster)
    assert "did not close cleanly" not in cluster.log()
    assert "Traceback" not in cluster.log()


def test_a_prefill_node_that_dies_in_mid_transfer(cluster: Cluster) -> None:
    """The stream ends, and the cluster, told not to restart anything, with 1. The decode node can
    do without a prefill node, if it was not told to stop before it heard of that."""
    stream = cluster.stream(fresh_prompt(600), max_tokens=100, ignore_eos=True, logprobs=0)
    assert next(stream)["choices"]
    node = cluster.node_process("prefill")
    assert node is not None
    up = cluster.processes.pop("up")
    node.kill()
    *_, last = stream
    assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    assert ended(up) == 1
    assert "prefill-0 ended with signal 9" in cluster.log()
    assert cluster.home.processes() == []


def test_a_connector_that_fails() -> None:
    """No KV ever arrives: after two failures the decode node computes the prompt itself."""
    options = slow(delay=0.2, breaks=True)
    with WarmCluster(MODEL, router={"breaker_failures": 100}, warm=shared(), **options) as cluster:
        prompt = fresh_prompt(40)
        choice = cluster.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]
        expected = reference.greedy(cluster.model, tuple(prompt), 8)
        assert choice["text"] == reference.decode(cluster.model, expected)
        assert text_of(cluster.stream(prompt, max_tokens=8, ignore_eos=True)) == choice["text"]
        assert "breaks on purpose" in cluster.log()
        migrations = re.findall(
            r'request_migrations_total{.*role="(\w+)".*} [1-9]', cluster.get("/metrics").text
        )
        assert set(migrations) == {"prefill"}  # each failure counts once, where it was
        cluster.wait_idle(5)
