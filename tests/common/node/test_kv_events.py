"""A subscriber of KV events knows a node's cache, even if it joined late or fell behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from live_node import decode_node, generate
from one_group import one_group
from pdserve.common.config.kv_events import KVEventsConfig, KVEventsOptions
from pdserve.common.core.block_hash import hash_blocks, short_hash
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import LayerKV, grouped
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.sequence import Sequence
from pdserve.common.node import kv_events
from pdserve.common.node.kv_events import KVEventLog, Subscription
from pdserve.common.node.kv_publisher import END, KVEventPublisher
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc

SIZE = 4


class Mirror:
    """The blocks that a taker believes are cached."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.stored: list[BlockStored] = []
        self.snapshots = 0

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert not self.blocks & set(event.block_hashes), "it is there already"
                self.blocks |= set(event.block_hashes)
                self.stored.append(event)
            elif isinstance(event, BlockRemoved):
                assert self.blocks >= set(event.block_hashes), "it never was"
                self.blocks -= set(event.block_hashes)
            else:
                self.blocks = set()
                self.snapshots += 1

    def read(self, message: pb.KVEventsMessage) -> None:
        self.take(decode_batch(message.batch))


def cached(pool: KVPool) -> set[int]:
    return {short_hash(each) for each in pool.cached()}


def run(pool: KVPool, tokens: list[int], seq_id: int = 0, **more: Any) -> Sequence:
    """A sequence that has been computed and still holds its blocks."""
    it = Sequence(seq_id, SamplingParams(), tokens, len(tokens), **more)
    fit = pool.fit(it.hashes(SIZE)[: (len(tokens) - 1) // SIZE], len(tokens), remote=False)
    assert pool.has_room(fit, 0)
    pool.admit(it, fit)
    while it.num_pending:
        end = pool.extend(it, min(it.num_computed + 8, it.num_tokens))
        pool.computed(it, end - it.num_computed)
    return it


def churn(pool: KVPool, rng: random.Random, rounds: int) -> Iterator[None]:
    """Prompts of few tokens, of which many share a prefix, in a cache that is too small for all."""
    held: list[Sequence] = []
    for number in range(rounds):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        adapter, salt = rng.choice(("", "a")), rng.choice(("", "s"))
        while len(held) > 2 or pool.num_free < 12:
            it = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.1:
                pool.forget(it)
            pool.release(it)
        held.append(run(pool, prompt, number, adapter=adapter, cache_salt=salt))
        yield
    for it in held:
        pool.release(it)
    yield


@pytest.mark.parametrize(
    "layers",
    [
        [LayerKV(1, 1), LayerKV(1, 1, window=5)],
        [LayerKV(1, 1, window=9), LayerKV(1, 1, window=5)],
        [LayerKV.of_state(1, 1)],
    ],
    ids=["full", "windows", "states"],
)
async def test_all_events_together_describe_the_cache(layers: list[LayerKV]) -> None:
    groups = grouped(layers)
    pool = KVPool(groups, [32] * len(groups), SIZE, in_flight=8)
    log, mirror = KVEventLog(0, pool, NodeMetrics()), Mirror()
    log.attach(mirror.take)
    for _ in churn(pool, random.Random(1), 300):
        await asyncio.sleep(0)  # the log's turn
        assert mirror.blocks == cached(pool)
    assert len(mirror.stored) > 100


async def test_a_log_without_subscribers_does_not_listen() -> None:
    pool = one_group(32, SIZE)
    log, mirror = KVEventLog(0, pool, NodeMetrics()), Mirror()
    assert pool._listener is None and pool.pools[0].on_removed is None
    log.attach(mirror.take)
    pool.release(run(pool, list(range(9))))
    log.detach(mirror.take)
    assert pool._listener is None and pool.pools[0].on_removed is None


async def test_an_event_says_which_blocks_follow_which_and_whose_they_are() -> None:
    pool, mirror = one_group(32, SIZE), Mirror()
    log = KVEventLog(3, pool, NodeMetrics())
    batches: list[KVEventBatch] = []
    log.attach(mirror.take)
    log.attach(batches.append)
    first = run(pool, list(range(10)))
    await asyncio.sleep(0)
    run(pool, [*range(8), 9, 9, 9, 9, 9], 1)
    run(pool, list(range(10)), 2, adapter="digest")
    run(pool, list(range(10)), 3, cache_salt="salt")
    await asyncio.sleep(0)
    plain = [short_hash(each) for each in first.hashes(SIZE)]
    one, two, adapted, salted = mirror.stored
    assert (one.block_hashes, one.parent_block_hash) == (plain, None)
    assert (one.token_ids, one.block_size, one.lora_name) == (list(range(8)), SIZE, None)
    assert (two.parent_block_hash, two.token_ids) == (plain[1], [9] * 4)
    assert adapted.lora_name == "digest" and adapted.token_ids == salted.token_ids == one.token_ids
    assert len({*plain, *adapted.block_hashes, *salted.block_hashes}) == 6, "they share none"
    assert [len(each.events) for each in batches] == [1, 3], "one batch for each turn of the loop"
    assert {each.data_parallel_rank for each in batches} == {3}


# ---- routers ----


async def test_a_router_begins_with_a_snapshot_and_gets_another_when_it_is_too_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "MAX_BEHIND", 60)
    monkeypatch.setattr(kv_events, "MAX_BATCH", 5)
    monkeypatch.setattr(kv_events, "PAUSE", 0)
    rng, metrics = random.Random(2), NodeMetrics()
    pools = [one_group(32, SIZE), one_group(32, SIZE)]
    logs = [KVEventLog(index, pool, metrics) for index, pool in enumerate(pools)]
    pool = pools[1]
    work = churn(pool, rng, 400)
    for _ in range(9):
        next(work)
    mirrors, number = [Mirror(), Mirror()], 0
    subscription = Subscription(logs, metrics)
    async with aclosing(subscription.messages()) as messages:

        async def read(count: int) -> None:
            nonlocal number
            for _ in range(count):
                message = await anext(messages)
                assert message.number == number
                number += 1
                batch = decode_batch(message.batch)
                mirrors[batch.data_parallel_rank or 0].take(batch)

        await read(1)
        for turn, _ in enumerate(work):
            await asyncio.sleep(0)
            if turn % 40 < 3 and subscription._stale + len(subscription._pending) > 0:
                await read(1)
        while subscription._stale or mirrors[1].blocks != cached(pool):
            await read(1)
    assert 1 < mirrors[1].snapshots < 30
    assert mirrors[0].blocks == set() and not mirrors[0].stored[0].token_ids
    assert pool._listener is None
    counted = metrics.registry.get_sample_value("pdserve_kv_events_total", {"event": "Snapshot"})
    assert counted == mirrors[1].snapshots


async def test_events_of_a_pause_are_one_message_per_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "PAUSE", 0)
    logs = [KVEventLog(index, one_group(32, SIZE), NodeMetrics()) for index in range(2)]
    subscription = Subscription(logs, NodeMetrics())
    async with aclosing(subscription.messages()) as messages:
        for _ in logs:
            await anext(messages)
        for number in range(10):
            log = logs[number % 2]
            log._add(BlockStored([number], None, [], SIZE))
            log.flush()
        batches = [decode_batch((await anext(messages)).batch) for _ in logs]
    blocks = {
        batch.data_parallel_rank: [event.block_hashes[0] for event in batch.events]
        for batch in batches
    }
    assert blocks == {0: [0, 2, 4, 6, 8], 1: [1, 3, 5, 7, 9]}


async def test_a_subscription_ends_within_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "PAUSE", 10**6)
    log = KVEventLog(0, one_group(32, SIZE), NodeMetrics())
    subscription = Subscription([log], NodeMetrics())
    messages = subscription.messages()
    await anext(messages)  # the snapshot
    log._add(BlockStored([1], None, [], SIZE))
    log.flush()
    await anext(messages)
    end = asyncio.create_task(anext(messages, None))
    await asyncio.sleep(0)
    subscription.end()
    assert await end is None


@asynccontextmanager
async def subscribed(address: str) -> AsyncIterator[tuple[Any, Any]]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel, pb_grpc.KVEventsStub(channel).Subscribe(pb.KVEventsRequest())


@pytest.mark.usefixtures("forked_ranks")
async def test_a_node_tells_of_what_it_computes_until_it_stops() -> None:
    async with decode_node(replicas=2) as (node, serving, _):
        async with subscribed(node.address) as (channel, call):
            mirror = Mirror()
            for _ in node.replicas:
                mirror.read(await call.read())
            assert mirror.blocks == set() and mirror.snapshots == 2
            await generate(channel)
            hashes = {short_hash(each) for each in hash_blocks(range(3, 40), 16)}
            while not mirror.blocks >= hashes:
                mirror.read(await call.read())
            node._kv_events.end()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        assert all(each.scheduler.pool._listener is None for each in node.replicas)
        assert not serving.done()


# ---- others' tools ----


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv",
        buffer_steps=2,
    )


async def test_tools_of_vllm_s_read_and_replay_them(config: KVEventsConfig) -> None:
    """Read without pdserve's own types, as the wire has them."""
    publisher = KVEventPublisher(config, 1)
    serving = asyncio.create_task(publisher.serve())
    context = zmq.asyncio.Context()
    endpoint, replay = config.of_replica(1)
    assert endpoint.endswith("events_dp1")
    try:
        with context.socket(zmq.SUB) as sub, context.socket(zmq.REQ) as ask:
            sub.connect(endpoint)
            sub.subscribe("kv")
            ask.connect(replay or "")
            stored = BlockStored([2**64 - 1, 5], None, [7] * 8, 4, lora_name="a")
            batches = [
                KVEventBatch(1.5, [stored], 1),
                KVEventBatch(2.5, [BlockRemoved([5]), AllBlocksCleared()], 1),
                KVEventBatch(3.5, [], 1),
            ]
            async with asyncio.timeout(30):
                while not await sub.poll(20):  # until the subscription has arrived
                    publisher.publish(KVEventBatch(0.0, [], 1))
                await sub.recv_multipart()
                for batch in batches:
                    publisher.publish(batch)
                got = [await sub.recv_multipart()]
                while got[-1][2] != msgspec.msgpack.encode([3.5, [], 1]):
                    got.append(await sub.recv_multipart())
                assert msgspec.msgpack.decode(got[-3][2]) == [
                    1.5,
                    [
                        {
                            "type": "BlockStored", "block_hashes": [2**64 - 1, 5],
                            "parent_block_hash": None, "token_ids": [7] * 8, "block_size": 4,
                            "lora_id": None, "medium": "GPU", "lora_name": "a",
                        }
                    ],
                    1,
                ]  # fmt: skip
                assert msgspec.msgpack.decode(got[-2][2])[1] == [
                    {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
                    {"type": "AllBlocksCleared"},
                ]
                assert [frames[0] for frames in got] == [b"kv"] * len(got)
                last = int.from_bytes(got[-1][1], "big")
                assert int.from_bytes(got[-3][1], "big") == last - 2
                await ask.send(last.to_bytes(8, "big"))  # of two that are kept
                assert await ask.recv_multipart() == got[-1][1:]
    finally:
        serving.cancel()
        publisher.close()
        context.term()


async def test_a_replay_ends_with_a_mark(config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config, 0)
    serving = asyncio.create_task(publisher.serve())
    for ts in (0.0, 1.0, 2.0):
        publisher.publish(KVEventBatch(ts, []))
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.DEALER) as ask:
            ask.connect(config.replay_endpoint or "")
            async with asyncio.timeout(30):
                await ask.send_multipart((b"nonsense",))
                await ask.send_multipart((b"", bytes(8)))
                frames = [await ask.recv_multipart() for _ in range(3)]
        assert [number for _, number, _ in frames] == [bytes(7) + b"\1", bytes(7) + b"\2", END]
    finally:
        serving.cancel()
        publisher.close()
        context.term()


async def test_an_endpoint_in_use_is_an_error_at_start(config: KVEventsConfig) -> None:
    tcp = KVEventPublisher(KVEventsConfig(endpoint="tcp://*:0"), 0)
    address = f"tcp://*:{tcp._doors[0].port}"
    try:
        with pytest.raises(ConfigError, match=r"--kv-events-config: cannot use tcp.*in use"):
            KVEventPublisher(KVEventsConfig(endpoint=address), 0)
    finally:
        tcp.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpoint": "tcp://*:5557"}, "nothing is published without enable_kv_cache_events"),
        ({"enable_kv_cache_events": 1}, "must be true or false"),
        ({"enable_kv_cache_events": True, "endpont": ""}, "did you mean endpoint"),
        ({"enable_kv_cache_events": True, "endpoint": "*:5557"}, "must be like tcp://"),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://*:99999"}, "must be like tcp://"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "must be zmq or null"),
        ({"enable_kv_cache_events": True, "buffer_steps": 0}, "whole number from 1 to"),
        ({"enable_kv_cache_events": True, "topic": 3}, "topic must be text"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KVEventsOptions(kv_events_config=given)


def test_replicas_have_ports_of_their_own() -> None:
    on = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:6000"}
    config = KVEventsOptions(kv_events_config=on).kv_events
    assert config is not None
    assert config.of_replica(0) == ("tcp://lo:5557", "tcp://*:6000")
    assert config.of_replica(2) == ("tcp://lo:5559", "tcp://*:6002")
    moved = KVEventsOptions(kv_events_config=on).moved(4).kv_events
    assert moved is not None and moved.of_replica(1) == ("tcp://lo:5562", "tcp://*:6005")
    assert KVEventsOptions(kv_events_config={**on, "publisher": "null"}).kv_events is None
    assert KVEventsOptions(kv_events_config={"enable_kv_cache_events": False}).kv_events is None
