"""Clients that leave, and a network that fails: whatever happens, every block comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reference
from callers import KINDS, Caller, call, fresh_prompt, storm
from cluster import node_metrics, text_of
from thinned import slow as rarely
from warm import WarmCluster

MODEL = "llama-gqa"
BLOCKS = 512
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
def cluster() -> Iterator[WarmCluster]:
    """Steps of both nodes, and the transfer between them, can be held: an answer that a client
    hangs up on must not be over."""
    router = {
        "max_concurrent_requests": PLACES,
        "max_client_share": 1,  # one client asks it all
        "scheduling_policy": "priority",
        "heartbeat_timeout": 30,  # a node that stands still is not lost
    }
    options = {"num_gpu_blocks_override": BLOCKS, "kv_lease": 30}
    with WarmCluster(MODEL, 0, 0, router, **options) as cluster:
        kv = slow(delay=DELAY, held=str(cluster.hold("kv")))
        cluster.start_held("prefill", **kv)
        cluster.start_held("decode", **kv)
        cluster.wait_nodes()
        yield cluster


def load(cluster: WarmCluster, role: str, name: str) -> float:
    (node,) = cluster.nodes(role)
    return node_metrics(node)[f"pdserve_{name}"]


def prefilling(cluster: WarmCluster) -> bool:
    return (
        load(cluster, "prefill", "num_requests_running") > 0
        and load(cluster, "decode", "num_requests_remote") > 0
    )


def transferring(cluster: WarmCluster) -> bool:
    """Every prompt is computed, and its KV not yet there."""
    return (
        load(cluster, "prefill", "num_requests_running") == 0
        and load(cluster, "prefill", "num_requests_waiting") == 0
        and load(cluster, "decode", "num_requests_remote") > 0
        and load(cluster, "prefill", "kv_blocks_free") < BLOCKS
    )


def decoding(cluster: WarmCluster) -> bool:
    return load(cluster, "decode", "num_requests_running") > 0


def count(cluster: WarmCluster, what: str) -> int:
    """Requests at the router: `running` or `waiting`."""
    return int(cluster.get("/v1/cluster").json()[what])


def is_quiet(cluster: WarmCluster) -> bool:
    """Returns whether the router serves no request and has none on a node."""
    state = cluster.get("/v1/cluster").json()
    placed = sum(node["in_flight"] for node in state["nodes"])
    return bool((state["running"], state["waiting"], placed) == (0, 0, 0))


def check_idle_and_exact(cluster: WarmCluster) -> None:
    """Nothing is held or counted any more, and the next answer is right."""
    cluster.wait_for(lambda: is_quiet(cluster))  # the last hang-up may be on its way
    cluster.wait_idle()
    assert all(node["breaker"] == "closed" for node in cluster.nodes())
    prompt = fresh_prompt(40)
    answer = cluster.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = reference.greedy(cluster.model, tuple(prompt), NUM_TOKENS)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("held", "stage", "num_callers", "num_prompt_tokens"),
    [("prefill", prefilling, 8, 900), ("kv", transferring, 1, 300), ("decode", decoding, 2, 20)],
)
def test_hanging_up(
    cluster: WarmCluster, kind: str, held: str, stage: Any, num_callers: int, num_prompt_tokens: int
) -> None:
    max_tokens = 1000 - num_prompt_tokens
    with cluster.standing_still(held):
        callers = [call(cluster, kind, num_prompt_tokens, max_tokens) for _ in range(num_callers)]
        cluster.wait_for(lambda: stage(cluster))
        for caller in callers:
            caller.hang_up()
        cluster.wait_for(lambda: is_quiet(cluster))  # whatever the nodes are at
    check_idle_and_exact(cluster)


def fill(cluster: WarmCluster) -> list[Caller]:
    """Callers that have all places."""
    served = [call(cluster, "streamed", 64, 900) for _ in range(PLACES)]
    cluster.wait_for(lambda: count(cluster, "running") == PLACES)
    return served


@pytest.mark.parametrize("kind", KINDS)
def test_hanging_up_in_the_queue(cluster: WarmCluster, kind: str) -> None:
    with cluster.standing_still("decode"):
        served = fill(cluster)
        queued = [call(cluster, kind, 100, 10) for _ in range(3)]
        cluster.wait_for(lambda: count(cluster, "waiting") == 3)
        for caller in queued:
            caller.hang_up()
        cluster.wait_for(lambda: count(cluster, "waiting") == 0)
        for caller in served:
            caller.hang_up()
    check_idle_and_exact(cluster)


def test_the_more_urgent_of_those_that_wait_is_served_first(cluster: WarmCluster) -> None:
    with ThreadPoolExecutor() as pool:
        with cluster.standing_still("decode"):
            served = fill(cluster)
            asked = []
            for priority in (5, -5):
                options = {"max_tokens": 2, "priority": priority, "timeline": True}
                asked.append(pool.submit(cluster.complete, fresh_prompt(64), **options))
                cluster.wait_for(lambda: count(cluster, "waiting") == len(asked))
        served.pop().hang_up()
        relaxed, urgent = (each.result()["pdserve"]["timeline"] for each in asked)
    assert relaxed["queued"] > urgent["queued"]
    for caller in served:
        caller.hang_up()
    check_idle_and_exact(cluster)


def test_a_storm_of_hang_ups(cluster: WarmCluster) -> None:
    storm(cluster, 40)
    check_idle_and_exact(cluster)
    assert "did not close cleanly" not in cluster.log()
    assert "Traceback" not in cluster.log()


def test_a_connector_that_fails() -> None:
    """No KV ever arrives: after two failures the decode node computes the prompt itself."""
    options = slow(delay=0.2, breaks=True)
    router = {"breaker_failures": 100, "heartbeat_timeout": 30}
    with WarmCluster(MODEL, router=router, **options) as cluster:
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
        cluster.wait_idle()


@pytest.mark.parametrize("ranks", [1, rarely(2)])
def test_a_node_ends_whose_connector_does_not_leave_blocks(ranks: int) -> None:
    """They would be the next request's. Another node takes over."""
    connector = {"kv_connector": "slow_connector:ClingingTCP", "kv_lease": 1}

    def options(clings: bool) -> dict[str, Any]:
        return {"kv_connector_config": json.dumps({"clings": clings}), "dtype": "float32"}

    with WarmCluster(MODEL, 0, 0, **connector) as cluster:
        cluster.start_node("decode", **options(False))
        clinging = cluster.start_node("prefill", tensor_parallel_size=ranks, **options(True))
        cluster.wait_nodes()
        pid = cluster.pids.pop(clinging)
        prompt = fresh_prompt(40)
        expected = reference.decode(
            cluster.model, reference.greedy(cluster.model, tuple(prompt), 8)
        )
        answer = cluster.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]
        assert answer["text"] == expected
        cluster.wait_for(lambda: cluster.exit_code(pid) == 1)
        assert "the KV connector failed to quiesce a transfer" in cluster.log()
        cluster.start_node("prefill", **options(False))
        cluster.wait_nodes()
        assert (
            cluster.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]["text"]
            == expected
        )
        cluster.wait_idle()
