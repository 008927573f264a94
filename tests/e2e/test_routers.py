"""Two routers of the same nodes: both serve, and the death of one is the other's gain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

import reference
from benchmarks.chaos import NODE_OPTIONS, Soak, learn_and_run
from benchmarks.fleet import FAST
from benchmarks.soak.asks import make_asks
from benchmarks.soak.load import clients
from callers import KINDS, call, fresh_prompt
from warm import WarmCluster, slowness

MODEL = "llama-gqa"
ASKS = make_asks(21, seed=0, max_tokens=(6, 20), vocab_size=512)
IN_FLIGHT = 16
PLACES, QUEUE = 16, 32
OTHER = "router-2"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    places = {"max_concurrent_requests": PLACES, "max_queued_requests": QUEUE}
    router = {**places, "max_client_share": 1}
    with WarmCluster(MODEL, routers=2, decode=0, router=router, **NODE_OPTIONS) as made:
        made.start_held("decode")
        made.wait_nodes()
        yield made


def test_both_serve_the_same_nodes_at_once(cluster: WarmCluster) -> None:
    both = [cluster, cluster.at(OTHER)]
    ids = [{node["node_id"] for node in each.nodes()} for each in both]
    assert len(ids[0]) == 2 and ids[0] == ids[1]
    prompts = [tuple(fresh_prompt(40 + number)) for number in range(8)]
    bodies = {"max_tokens": 12, "logprobs": 0, "return_tokens_as_token_ids": True}

    def ask(number: int) -> tuple[int, ...]:
        answer = both[number % 2].complete(list(prompts[number]), ignore_eos=True, **bodies)
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        return tuple(int(token.removeprefix("token_id:")) for token in tokens)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [reference.greedy(cluster.model, prompt, 12) for prompt in prompts]
    cluster.wait_idle()


def test_a_router_dies_under_load(cluster: WarmCluster) -> None:
    """Through the other nothing is lost; the nodes free what the dead one's requests held, and find
    the one that takes its place within a few heartbeats."""
    with cluster.standing_still("decode"):
        interrupted = [call(cluster, kind, 100, 400) for kind in KINDS]
        cluster.wait_for(lambda: sum(node["running"] for node in cluster.nodes("decode")) == 3)

    async def die_and_return() -> None:
        cluster.kill("router")
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cluster.start_router)
        await asyncio.to_thread(cluster.wait_for, lambda: cluster.get("/health").ok)
        since = monotonic()
        await asyncio.to_thread(cluster.wait_nodes)
        assert monotonic() - since < (3 * FAST["heartbeat_interval"] + 0.5) * slowness()

    async def run() -> None:
        async with clients(cluster, ASKS, [OTHER]) as load:
            await load.learn()
            tally = await load.during(die_and_return(), IN_FLIGHT)
        assert not tally.lost and not tally.wrong and not tally.hung, tally
        assert tally.completed >= IN_FLIGHT and not tally.migrations

    asyncio.run(run())
    for caller in interrupted:
        caller.hang_up()
    cluster.wait_idle()
    assert cluster.crashed() == []


def test_what_one_router_places_the_other_knows(cluster: WarmCluster) -> None:
    """While one holds all places the other has its half of them and its queue; what is more, it
    refuses at once. Nothing that it took is lost."""
    other = cluster.at(OTHER)

    def ask(through: WarmCluster) -> int:
        body = {"prompt": fresh_prompt(20), "max_tokens": 4, "ignore_eos": True}
        return through.post("/v1/completions", **body).status_code

    def load(through: WarmCluster) -> tuple[int, int]:
        state = through.get("/v1/cluster").json()
        return state["running"], state["waiting"]

    with ThreadPoolExecutor(PLACES + PLACES + QUEUE) as pool:
        with cluster.standing_still("decode"):
            first = [pool.submit(ask, cluster) for _ in range(PLACES)]
            cluster.wait_for(lambda: other.nodes("decode")[0]["others"] == PLACES)
            cluster.wait_for(lambda: other.get("/v1/cluster").json()["places"] == PLACES // 2)
            assert cluster.nodes("decode")[0]["others"] == 0
            second = [pool.submit(ask, other) for _ in range(PLACES + QUEUE)]
            cluster.wait_for(lambda: load(other) == (PLACES // 2, QUEUE))
            refused = PLACES // 2
            cluster.wait_for(lambda: sum(each.done() for each in second) == refused)
        codes = sorted(each.result() for each in second)
        assert codes == [200] * (PLACES // 2 + QUEUE) + [429] * refused
        assert [each.result() for each in first] == [200] * PLACES
    cluster.wait_idle()


def test_a_node_that_drains_leaves_both(cluster: WarmCluster) -> None:
    new = cluster.start_node("prefill")
    cluster.wait_nodes()
    pid = cluster.drain(new)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
    assert cluster.exit_code(pid) == 0
    for router in cluster.routers:
        assert new not in {node["name"] for node in cluster.state(router)["nodes"]}


def test_routers_die_in_a_soak(cluster: WarmCluster) -> None:
    """Only what a killed router was serving ends with it; its clients go to the other."""
    kill = ("router-kill",)
    soak = Soak(2.0, IN_FLIGHT, len(ASKS), (6, 20), 0.0, kill, period=0.5, longest=0.5)
    report = asyncio.run(learn_and_run(cluster, soak, ASKS))
    assert not any(report.failures.values()), f"{report}\n{cluster.log()[-6000:]}"
    assert report.faults.keys() == {"router-kill router"}, report
    assert report.completed > IN_FLIGHT
