"""Nodes and router are replaced while they serve: nothing is lost, and no answer is made of two
versions of the model."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from safetensors.torch import load_file, save_file

import reference
from benchmarks.chaos import NODE_OPTIONS
from benchmarks.soak.asks import Ask, make_asks
from benchmarks.soak.client import Answer, difference
from benchmarks.soak.faults import restart
from benchmarks.soak.load import Load, Tally, clients
from callers import KINDS, call
from cluster import MODELS, node_metrics
from warm import WarmCluster

MODEL = "llama-gqa"
ASKS = make_asks(21, seed=0, max_tokens=(6, 20), vocab_size=512)  # each way with each style
IN_FLIGHT = 6
MANY = 32  # some of which wait for blocks, given FEW_BLOCKS
FEW_BLOCKS = 64

Event = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, prefill=2, decode=0, **NODE_OPTIONS) as made:
        for _ in range(2):
            made.start_held("decode")
        made.wait_nodes()
        yield made


def under_load(cluster: WarmCluster, event: Event) -> Tally:
    """Counts what became of requests that were under way during the event."""

    async def run() -> Tally:
        async with clients(cluster, ASKS) as load:
            await load.learn()
            return await load.during(event(), IN_FLIGHT)

    return asyncio.run(run())


def check(cluster: WarmCluster, tally: Tally) -> None:
    assert not tally.lost and not tally.wrong, f"{tally}\n{cluster.log()[-6000:]}"
    assert tally.completed >= IN_FLIGHT
    assert cluster.crashed() == [], cluster.log()[-9000:]
    cluster.wait_idle()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


async def used(cluster: WarmCluster, *names: str) -> None:
    """Until each of these nodes has a request of the router."""

    def in_flight() -> set[str]:
        return {node["name"] for node in cluster.state()["nodes"] if node["in_flight"]}

    await until(lambda: in_flight() >= {*names})


async def drain(cluster: WarmCluster, name: str) -> None:
    """Until it has ended, by itself."""
    pid = cluster.drain(name)
    await until(lambda: cluster.exit_code(pid) is not None)
    assert cluster.exit_code(pid) == 0, cluster.log()[-6000:]


@pytest.mark.slow
def test_the_router_is_replaced(cluster: WarmCluster) -> None:
    """The requests that it was serving are given up, and its nodes find the new one. First, while
    the decode nodes are those that can be held."""
    ids = {node["node_id"] for node in cluster.nodes()}
    with cluster.standing_still("decode"):
        interrupted = [call(cluster, kind, 100, 400) for kind in KINDS]
        cluster.wait_for(lambda: sum(node["running"] for node in cluster.nodes("decode")) == 3)
        assert cluster.held().keys() & {*cluster.names("decode")}
        cluster.kill("router")
    cluster.start_router()
    cluster.wait_nodes()
    assert {node["node_id"] for node in cluster.nodes()} == ids
    for caller in interrupted:
        caller.hang_up()
    cluster.wait_idle()
    before = moved(cluster)

    def all_move() -> bool:
        return all(now > then for now, then in zip(moved(cluster), before, strict=True))

    check(cluster, under_load(cluster, lambda: until(all_move)))


def moved(cluster: WarmCluster) -> list[float]:
    """Bytes of KV that nodes have sent or received, in the order of their ids."""
    nodes = sorted(cluster.nodes(), key=lambda node: str(node["node_id"]))
    return [node_metrics(node)["pdserve_kv_transfer_bytes_total"] for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_nodes_are_replaced(cluster: WarmCluster, count: int) -> None:
    """A prefill and a decode node at a time; all of them in the end, or the first."""
    pairs = list(zip(cluster.names("prefill"), cluster.names("decode"), strict=True))[:count]
    before = len(cluster.drained)
    old = {name for pair in pairs for name in pair}

    async def replace() -> None:
        for pair in pairs:
            await asyncio.gather(*(restart(cluster, name, 0) for name in pair))

    check(cluster, under_load(cluster, replace))
    assert [cluster.exit_code(pid) for pid in cluster.drained[before:]] == [0] * len(old)
    assert cluster.ready().isdisjoint(old)


# ---- two versions ---------------------------------------------------------------------------


SOME_ASKS = ASKS[::2]


def other_version(folder: Path, to: Path) -> Path:
    """The same model, of the same name, a little further trained."""
    copy = Path(shutil.copytree(folder, to / folder.name))
    weights = load_file(copy / "model.safetensors")
    trained = {name: each * 0.9 if "_proj" in name else each for name, each in weights.items()}
    save_file(trained, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def answers_of(answers: list[Answer], load: Load, version: int) -> int:
    """How many are those of the version."""
    known = (expected[version] for expected in load.expected)
    return sum(not difference(*pair) for pair in zip(known, answers, strict=True))


def check_pairings(cluster: WarmCluster, *pools: set[str]) -> None:
    state = cluster.state()
    names = {node["node_id"]: node["name"] for node in state["nodes"]}
    pairs = {(names[each["prefill"]], names[each["decode"]]) for each in state["pairings"]}
    assert pairs == {
        (p, d) for pool in pools for p in pool for d in pool if p[0] == "p" and d[0] == "d"
    }


class Versions:
    """A cluster with nodes of version A and of version B; `expected` has the answers of both."""

    def __init__(self, cluster: WarmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.a = {*cluster.names("prefill"), *cluster.names("decode")}
        self.expected: list[list[Answer]] = []
        self.run(Load.learn)
        self.b = {cluster.start_node(role, model=folder) for role in ("prefill", "decode")}
        cluster.wait_nodes()
        check_pairings(cluster, self.a, self.b)
        for name in self.a:
            cluster.send(name, signal.SIGSTOP)
        cluster.wait_for(lambda: cluster.ready().isdisjoint(self.a))
        self.run(Load.learn)
        for name in self.a:
            cluster.send(name, signal.SIGCONT)
        cluster.wait_nodes()

    def run(self, what: Callable[[Load], Coroutine[Any, Any, T]]) -> T:
        """With clients who know the answers."""

        async def run() -> T:
            async with clients(self.cluster, SOME_ASKS) as load:
                load.expected = self.expected or load.expected
                result = await what(load)
                self.expected = load.expected
                return result

        return asyncio.run(run())

    def check(self, event: Event) -> None:
        check(self.cluster, self.run(lambda load: load.during(event(), MANY)))

    def answers(self) -> tuple[int, int]:
        """How many of all answers are those of A, and of B."""

        async def count(load: Load) -> tuple[int, int]:
            answers = await load.ask_all()
            return answers_of(answers, load, 0), answers_of(answers, load, 1)

        return self.run(count)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    folder = other_version(MODELS / MODEL, tmp_path_factory.mktemp("b"))
    # No lease lapses in time to end a wait in vain.
    options = {**NODE_OPTIONS, "num_gpu_blocks_override": FEW_BLOCKS, "kv_lease": 60}
    with WarmCluster(MODEL, prefill=1, decode=2, hasty=True, **options) as cluster:
        yield Versions(cluster, folder)


def test_two_versions_side_by_side(versions: Versions) -> None:
    differ = [bool(difference(*answers)) for answers in versions.expected]
    assert sum(differ) > len(SOME_ASKS) / 2
    of_a, of_b = versions.answers()
    assert min(of_a, of_b) > 0 and of_a + of_b >= len(SOME_ASKS)


def test_streams_stay_with_their_version(versions: Versions) -> None:
    """They go on on the other node of A, though there is one of B."""

    async def fail() -> None:
        await used(versions.cluster, "decode-3")
        versions.cluster.kill("decode-3")
        await until(lambda: "decode-3" not in versions.cluster.ready())

    versions.check(fail)


def test_a_version_leaves(versions: Versions) -> None:
    """A request that waits on A for a prefill moves to B."""

    async def leave() -> None:
        await used(versions.cluster, "prefill-1", "decode-2")
        await drain(versions.cluster, "prefill-1")
        await drain(versions.cluster, "decode-2")

    versions.check(leave)
    check_pairings(versions.cluster, versions.b)
    assert versions.answers()[1] == len(SOME_ASKS)


# ---- a drain in mid-transfer ----------------------------------------------------------------

LONG = Ask("grpc", tuple(range(5, 405)), {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8})


def test_a_drained_prefill_node_finishes_its_transfer() -> None:
    patient = {"heartbeat_timeout": 30}
    options = {"kv_lease": 30, "drain_timeout": 60}
    with WarmCluster(MODEL, 0, 0, patient, **options) as cluster:
        config = json.dumps({"delay": 0, "held": str(cluster.hold("kv"))})
        kv = {"kv_connector": "slow_connector:SlowTCP", "kv_connector_config": config}
        for role in ("prefill", "prefill", "decode"):
            cluster.start_node(role, **kv)
        cluster.wait_nodes()

        async def run() -> Answer:
            async with clients(cluster, [LONG]) as load:
                with cluster.standing_still("kv"):
                    answers = asyncio.create_task(load.ask_all())
                    name = await asyncio.to_thread(cluster.busy, "prefill")
                    draining = asyncio.create_task(drain(cluster, name))
                    await asyncio.to_thread(cluster.wait_for, lambda: name not in cluster.ready())
                await draining
                return (await answers)[0]

        answer = asyncio.run(run())
        expected = reference.greedy(cluster.model, LONG.prompt, 8)
        assert tuple(answer.choices[0].tokens) == expected
        assert answer.migrations == 0  # no other node served it
        cluster.wait_idle()
