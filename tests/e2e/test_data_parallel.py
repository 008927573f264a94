"""Replicas in one node, through real processes: exact tokens, load on all of them, prefixes where
they are cached, and a rank whose death ends its node and no request."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reference
from callers import call
from cluster import node_metrics
from warm import WarmCluster, ranks_of, suspended

NUM_TOKENS = 24
BLOCKS = 192  # of each replica


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Nothing ends because somebody is late, or stands still for a while."""
    late = {"router": {"heartbeat_timeout": 30}, "kv_lease": 60, "engine_stall_timeout": 60}
    options = {"data_parallel_size": 2, "num_gpu_blocks_override": BLOCKS, **late}
    with WarmCluster("llama-gqa", **options) as made:
        yield made


def prompt(number: int) -> tuple[int, ...]:
    """30 to 85 tokens; those of different numbers share no block."""
    length = 30 + 5 * (number % 12)
    return (5 + number, *(5 + (number + 7 * i) % 500 for i in range(1, length)))


def check(cluster: WarmCluster, case: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> None:
    answer = cluster.complete(list(case), max_tokens=num_tokens, ignore_eos=True)
    expected = reference.greedy(cluster.model, case, num_tokens)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


def check_until(cluster: WarmCluster, done: Callable[[], bool]) -> None:
    """New prompts, twelve at once, until all that should work has had some. Once is enough, but
    that a slow client's prompts may come one by one."""
    for first in range(0, 120, 12):
        cases = [prompt(number) for number in range(first, first + 12)]
        for case in cases:
            reference.greedy(cluster.model, case, NUM_TOKENS)  # not while the nodes compute
        with ThreadPoolExecutor(len(cases)) as pool:
            list(pool.map(lambda case: check(cluster, case), cases))
        cluster.wait_idle()
        if done():
            return
    raise AssertionError("a replica has had nothing to do")


def counts(node: dict[str, Any], name: str) -> list[float]:
    """A counter of each replica."""
    engines = range(node["data_parallel_size"])
    return [node_metrics(node, engine)[f"pdserve_{name}_total"] for engine in engines]


def all_used(node: dict[str, Any]) -> bool:
    return min(counts(node, "prefix_cache_queries")) > 0


def test_all_replicas_work(cluster: WarmCluster) -> None:
    (prefill,), (decode,) = cluster.nodes("prefill"), cluster.nodes("decode")
    check_until(cluster, lambda: all_used(prefill) and all_used(decode))
    assert decode["num_blocks"] == 2 * BLOCKS
    sizes = "tensor", "pipeline", "expert", "data"
    assert [decode[f"{size}_parallel_size"] for size in sizes] == [1, 1, 1, 2]
    assert "tp 1, pp 1, ep 1, dp 2" in cluster.log()


def test_a_prompt_goes_to_the_replica_that_knows_it(cluster: WarmCluster) -> None:
    """All replicas are idle, so for any other reason it would go to replica 0."""
    (node,) = cluster.nodes("decode")
    cases = [prompt(number) for number in range(200, 203)]
    full_blocks = sum(len(case) // 16 * 16 for case in cases)
    before = counts(node, "prefix_cache_hits")
    busy = ranks_of(cluster.pids[cluster.names("decode")[0]])[0]
    with suspended(busy):  # replica 0's answer is not over before its client leaves
        caller = call(cluster, "streamed", num_prompt_tokens=20, max_tokens=20)
        cluster.wait_for(lambda: node_metrics(node, 0)["pdserve_num_requests_remote"] == 1)
        for case in cases:
            check(cluster, case, num_tokens=2)
        caller.hang_up()
    cluster.wait_idle()
    assert counts(node, "prefix_cache_hits") == before
    for case in cases:
        check(cluster, case, num_tokens=2)
    assert counts(node, "prefix_cache_hits") == [before[0], before[1] + full_blocks]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, {}),
        ({}, {"data_parallel_size": 2, "kv_connector": "tcp"}),
    ],
    ids=["dp2-tp2-to-1", "1-to-dp2"],
)
def test_roles_choose_by_themselves(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    with WarmCluster("llama-gqa", 0, 0) as cluster:
        cluster.start_node("prefill", **prefill)
        cluster.start_node("decode", **decode)
        cluster.wait_nodes()
        check_until(cluster, lambda: all(all_used(node) for node in cluster.nodes()))


def test_a_rank_dies_and_its_node_with_it(cluster: WarmCluster) -> None:
    """The requests of both replicas go on on another node. Last, for it leaves one node less."""
    (name,) = cluster.names("decode")
    pid = cluster.pids[name]
    cluster.start_node("decode", data_parallel_size=1)
    cluster.wait_nodes()
    num_tokens, cases = 60, [prompt(number) for number in range(6)]
    for case in cases:
        reference.greedy(cluster.model, case, num_tokens)
    node = next(node for node in cluster.state()["nodes"] if node["name"] == name)
    before, ranks, over = counts(node, "generation_tokens"), ranks_of(pid), threading.Event()

    def ask_on(case: tuple[int, ...]) -> None:
        check(cluster, case, num_tokens)
        while not over.is_set():
            check(cluster, case, num_tokens)

    def both_at_work() -> bool:
        """If so, they stand still, so that they are when one of them dies."""
        for rank in ranks:
            rank.suspend()
        running = [node_metrics(node, engine)["pdserve_num_requests_running"] for engine in (0, 1)]
        after = counts(node, "generation_tokens")
        if all(running) and all(new > old for new, old in zip(after, before, strict=True)):
            return True
        for rank in ranks:
            rank.resume()
        return False

    with ThreadPoolExecutor(len(cases)) as pool:
        clients = [pool.submit(ask_on, case) for case in cases]
        try:
            cluster.wait_for(both_at_work)
            ranks[0].resume()
            ranks[1].send_signal(signal.SIGKILL)
            del cluster.pids[name]
        finally:
            over.set()
        for client in clients:
            client.result()
    cluster.wait_for(lambda: cluster.exit_code(pid) == 1)
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    assert f": rank 0 (pid {ranks[1].pid}) was killed by SIGKILL" in cluster.log()
    assert "pdserve_request_migrations_total{" in cluster.get("/metrics").text
    cluster.wait_idle()
