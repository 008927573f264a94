"""A router's belief of what nodes have cached: nothing that they did not say in order, or that
cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.block_hash import hash_blocks, short_hash
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    encode_batch,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.router.cluster import node_caches
from pdserve.router.cluster.node_caches import NodeCaches
from pdserve.router.cluster.prefix_index import PrefixIndex, PromptBlocks
from pdserve.router.cluster.registry import Registry
from waiting import eventually

SIZE = 4
TOKENS = list(range(40))
HASHES = [short_hash(each) for each in hash_blocks(TOKENS, SIZE)]


class Teller(pb_grpc.KVEventsServicer):
    """A node that says what a test puts into its queue; a new subscription gets a snapshot."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.snapshot: Sequence[int] = ()
        self.first: Any = None  # in place of the snapshot's events
        self.subscriptions = 0
        self.number = 0

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[pb.KVEventsMessage]:
        self.subscriptions += 1
        self.number = 0
        yield self.message(self.first or [AllBlocksCleared(), stored(*self.snapshot)])
        self.first = None
        while (said := await self.says.get()) is not None:
            yield said if isinstance(said, pb.KVEventsMessage) else self.message(said)

    def message(self, events: Any, replica: int = 0, number: int | None = None) -> Any:
        batch = encode_batch(KVEventBatch(0.0, events, replica))
        said = pb.KVEventsMessage(number=self.number if number is None else number, batch=batch)
        self.number += 1
        return said


def stored(*hashes: int, size: int = SIZE) -> BlockStored:
    return BlockStored(list(hashes), None, [], size)


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes))


class World:
    def __init__(self, index: PrefixIndex) -> None:
        self.registry = Registry(RoutingConfig())
        self.metrics = RouterMetrics()
        self.channels = Channels()
        self.caches = NodeCaches(
            self.registry, self.channels, [pb.ROLE_PREFILL], self.metrics, index
        )

    def register(self, name: str, address: str, role: int = pb.ROLE_PREFILL, **more: Any) -> None:
        info = {"fingerprint": "f", "block_size": SIZE, "num_blocks": 100, **more}
        self.registry.register(
            pb.NodeInfo(node_id=name, role=role, address=address, **info),
            pb.NodeLoad(healthy=True),
        )

    def known(self, tokens: list[int] = TOKENS) -> dict[str, int]:
        """Blocks by node."""
        found = self.caches.match(lambda size: PromptBlocks(tokens, size))
        return {node.id: count for node, count in found.items()}

    def resyncs(self, reason: str) -> float:
        labels = {"reason": reason}
        name = "pdserve_kv_event_resyncs_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def telling() -> AsyncIterator[tuple[Teller, str]]:
    server, teller = grpc.aio.server(), Teller()
    pb_grpc.add_KVEventsServicer_to_server(teller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield teller, address
    finally:
        await server.stop(0)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(node_caches, "FIRST_RETRY", 0.02)
    monkeypatch.setattr(node_caches, "PERIOD", 0.02)
    made = World(PrefixIndex())
    running = asyncio.create_task(made.caches.run())
    yield made
    running.cancel()
    await made.channels.close()


async def test_a_prompt_is_found_where_it_is_and_no_more_where_it_was(world: World) -> None:
    async with telling() as (one, at), telling() as (two, other):
        one.snapshot = HASHES[:3]
        world.register("p0", at, data_parallel_size=2)
        world.register("p1", other)
        world.register("d0", "127.0.0.1:9", pb.ROLE_DECODE)
        await eventually(lambda: world.known() == {"p0": 3} and two.subscriptions)
        assert two.subscriptions == one.subscriptions == 1
        two.says.put_nowait([stored(*HASHES[:2])])
        one.says.put_nowait(one.message([AllBlocksCleared(), stored(*HASHES[:7])], replica=1))
        await eventually(lambda: world.known() == {"p0": 7, "p1": 2})
        one.says.put_nowait(one.message([removed(*HASHES[2:7])], replica=1))
        two.says.put_nowait([removed(*HASHES[:2]), stored(*HASHES[:9])])
        await eventually(lambda: world.known() == {"p0": 3, "p1": 9})
        two.says.put_nowait([AllBlocksCleared()])
        await eventually(lambda: world.known() == {"p0": 3})
        world.registry.deregister("p0")
        await eventually(lambda: world.known() == {})
    assert world.resyncs("gap") == world.resyncs("unknown_block") == 0


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("gap", lambda t: t.message([], number=7)),
        ("unknown_block", lambda t: t.message([removed(HASHES[5])])),
        ("unknown_replica", lambda t: t.message([stored(1)], replica=1)),
        ("unknown_replica", lambda t: t.message([stored(1)], replica=-1)),
        ("too_many_blocks", lambda t: t.message([stored(*range(101))])),
        ("malformed", lambda t: pb.KVEventsMessage(number=1, batch=b"\xc1")),
        ("malformed", lambda t: t.message([stored(1, size=SIZE + 1)])),
        ("ended", lambda t: None),
    ],
)
async def test_inconsistent_events_reset_the_cache_and_are_counted(
    world: World, reason: str, said: Any
) -> None:
    async with telling() as (teller, at), telling() as (good, other):
        teller.snapshot, good.snapshot = HASHES[:3], HASHES[:2]
        world.register("p0", at)
        world.register("p1", other)
        await eventually(lambda: world.known() == {"p0": 3, "p1": 2})
        teller.snapshot = HASHES[:6]
        teller.says.put_nowait(said(teller))
        await eventually(lambda: world.known() == {"p0": 6, "p1": 2})
        assert (teller.subscriptions, good.subscriptions) == (2, 1)
        assert world.resyncs(reason) == 1


async def test_a_stream_without_a_snapshot_is_not_believed(world: World) -> None:
    async with telling() as (teller, at):
        teller.first, teller.snapshot = [stored(*HASHES[:3])], HASHES[:1]
        world.register("p0", at)
        await eventually(lambda: world.known() == {"p0": 1})
        assert world.resyncs("no_snapshot") == 1


async def test_nodes_with_states_alone_are_searched_from_the_end(world: World) -> None:
    async with telling() as (teller, at), telling() as (other, there):
        teller.snapshot = [HASHES[3], HASHES[7]]
        other.snapshot = HASHES[:2]
        world.register("p0", at, states_alone=True)
        world.register("p1", there)
        await eventually(lambda: world.known() == {"p0": 8, "p1": 2})
        assert world.known(TOKENS[: 6 * SIZE]) == {"p0": 4, "p1": 2}


async def test_a_process_that_takes_over_an_id_is_another_node(world: World) -> None:
    async with telling() as (old, at):
        old.snapshot = HASHES[:3]
        world.register("p0", at, instance="a")
        await eventually(lambda: world.known() == {"p0": 3})
        old.snapshot = HASHES[:1]
        world.register("p0", at, instance="b")
        await eventually(lambda: world.known() == {"p0": 1})
        assert old.subscriptions == 2


async def test_a_node_that_dies_is_forgotten_and_one_of_before_is_no_trouble(world: World) -> None:
    async with telling() as (teller, at):
        teller.snapshot = HASHES[:3]
        world.register("p0", at)
        await eventually(lambda: world.known() == {"p0": 3})
    await eventually(lambda: world.known() == {} and world.resyncs("lost"))
    server = grpc.aio.server()  # without the service
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    world.register("p1", f"127.0.0.1:{port}")
    before = world.resyncs("lost")
    await eventually(lambda: world.resyncs("lost") > before + 1)
    assert world.known() == {}
    await server.stop(0)


async def test_neither_a_closed_channel_nor_a_defect_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with telling() as (teller, at):
        teller.snapshot = HASHES[:3]
        world.register("p0", at)
        await eventually(lambda: world.known() == {"p0": 3})
        await world.channels.drop([at])
        await eventually(lambda: teller.subscriptions == 2 and world.known() == {"p0": 3})
        assert world.resyncs("lost") == 1
        monkeypatch.setattr(world.caches.index, "store", lambda *args: 1 / 0)
        teller.says.put_nowait([stored(*HASHES[3:4])])
        await eventually(lambda: world.resyncs("defect"))
        monkeypatch.undo()
        await eventually(lambda: world.known() == {"p0": 3})
    assert "could not be taken" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_a_full_index_forgets_and_removals_of_what_it_forgot_are_no_fault() -> None:
    world = World(PrefixIndex(max_blocks=0))  # a few in each shard
    world.register("p0", "127.0.0.1:9", num_blocks=10**6)
    (node,) = world.registry.nodes()
    many = [number << 10 for number in range(100)]  # of one shard
    begun: set[int] = set()
    await world.caches._apply(node, 0, [AllBlocksCleared(), stored(*many)], begun)
    assert world.caches.index.num_evicted > 0
    await world.caches._apply(node, 0, [removed(*many)], begun)
    assert len(world.caches.index) == 0


@pytest.mark.parametrize(
    "events",
    [
        [removed(*range(50_000))],
        [removed(number) for number in range(10_000)],
        [stored(number) for number in range(300_000, 310_000)],
        [AllBlocksCleared(), stored(1)] * 100,
    ],
    ids=["one event", "removals", "stores", "clears"],
)
async def test_events_take_a_small_share_of_the_event_loop(
    events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are: after a clear each event of one block took a millisecond."""
    world = World(PrefixIndex())
    index, now = world.caches.index, [0.0]
    store, remove, sweep = index.store, index.remove, index.sweep

    def costly(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(place: Any, hashes: list[int]) -> Any:
            now[0] += 3e-6 + 1e-6 * len(hashes)
            return change(place, hashes)

        return changed

    def costly_sweep() -> Iterator[None]:
        for _ in sweep():
            now[0] += 1e-4
            yield

    monkeypatch.setattr(node_caches, "perf_counter", lambda: now[0])
    monkeypatch.setattr(index, "store", costly(store))
    monkeypatch.setattr(index, "remove", costly(remove))
    monkeypatch.setattr(index, "sweep", costly_sweep)
    world.register("p-1", "127.0.0.1:9", num_blocks=10**6)
    (node,), begun, most = world.registry.nodes(), set[int](), 0.0
    sweeping = asyncio.create_task(world.caches._sweep())
    before = [AllBlocksCleared(), stored(*range(50_000))]
    applying = asyncio.create_task(world.caches._apply(node, 0, [*before, *before, *events], begun))
    while not applying.done():
        begins = now[0]
        await asyncio.sleep(0)
        most = max(most, now[0] - begins)
    sweeping.cancel()
    await applying
    assert 0 < most < 3 * node_caches.WORK  # events', and the sweep's
