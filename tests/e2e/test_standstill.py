"""A router that stood still: nothing is lost with it, and no node is to blame."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import reference
from warm import WarmCluster

PROMPT = tuple(range(5, 25))
NUM_TOKENS = 90
STREAMS = 6  # more than open a breaker, had each been a failure
GIVES_UP = 3.0  # seconds after which nodes close the connections of a router that is silent


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """The cluster has slow nodes, which close the connections of a router that has been frozen."""
    slow = ("mortal:keepalive", str(GIVES_UP), "benchmarks.hosts:slow_steps", "0.06")
    with WarmCluster("llama-gqa", 0, 0, no_enable_prefix_caching="") as cluster:
        for role in ("prefill", "decode"):
            cluster.start_node(role, slow)
        cluster.wait_nodes()
        yield cluster


def test_after_a_router_s_freeze_no_innocent_node_is_broken(cluster: WarmCluster) -> None:
    tokens = reference.greedy(cluster.model, PROMPT, NUM_TOKENS)
    text = reference.decode(cluster.model, tokens)

    def ask(_: int) -> str:
        answer = cluster.complete(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(ask, each) for each in range(STREAMS)]
        cluster.wait_for(lambda: busy(cluster) == STREAMS)
        cluster.send("router", signal.SIGSTOP)
        time.sleep(3 * GIVES_UP)
        cluster.send("router", signal.SIGCONT)
        states = set()
        while not all(each.done() for each in answers):
            states |= {node["state"] for node in cluster.nodes()}
            time.sleep(0.02)
        assert [each.result() for each in answers] == [text] * STREAMS
    assert "broken" not in states
    log = cluster.log()
    assert "ROUTER_STOOD_STILL" in log, "the freeze broke no connection"
    assert "PROTOCOL_ERROR" not in log and "blame=decode" not in log
    assert trips(cluster) == 0


def busy(cluster: WarmCluster) -> int:
    return sum(node["running"] for node in cluster.nodes() if node["role"] == "decode")


def trips(cluster: WarmCluster) -> float:
    lines = cluster.get("/metrics").text.splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith("pdserve_breaker_trips"))
    return float(value)
