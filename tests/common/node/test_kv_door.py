"""The ports of KV events take little from anyone, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pdserve.common.config.kv_events import KVEventsConfig
from pdserve.common.node import kv_door, kv_publisher
from pdserve.common.node.kv_publisher import KVEventPublisher
from pdserve.common.rpc.kv_events import BlockStored, KVEventBatch
from waiting import eventually

BATCH = KVEventBatch(0.0, [BlockStored([5], None, [7] * 50_000, 4)])


class World:
    def __init__(self, publisher: KVEventPublisher, context: zmq.asyncio.Context) -> None:
        self.publisher = publisher
        self.ports = [door.port for door in publisher._doors]
        self._context = context

    async def is_served(self) -> None:
        """A subscriber that came now gets events and replays."""
        with self._context.socket(zmq.SUB) as sub, self._context.socket(zmq.REQ) as ask:
            sub.connect(f"tcp://127.0.0.1:{self.ports[0]}")
            sub.subscribe("kv")
            ask.connect(f"tcp://127.0.0.1:{self.ports[1]}")
            async with asyncio.timeout(30):
                while not await sub.poll(20):
                    self.publisher.publish(KVEventBatch(0.0, []))
                topic, number, _ = await sub.recv_multipart()
                await ask.send(number)
                assert topic == b"kv" and (await ask.recv_multipart())[0] == number


@pytest.fixture
async def world() -> AsyncIterator[World]:
    ends = {"endpoint": "tcp://lo:0", "replay_endpoint": "tcp://lo:0"}
    publisher = KVEventPublisher(KVEventsConfig(topic="kv", **ends), 0)
    serving = asyncio.create_task(publisher.serve())
    context = zmq.asyncio.Context()
    yield World(publisher, context)
    context.destroy(linger=0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    publisher.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("port", [0, 1])
async def test_idle_connections_are_bounded(world: World, port: int) -> None:
    """993 of them took the node's files."""
    before = open_files()
    held = [await asyncio.open_connection("127.0.0.1", world.ports[port]) for _ in range(300)]
    await eventually(lambda: open_files() - len(held) - before <= 3 * kv_door.MAX_OF_ADDRESS + 8)
    for _, writer in held:
        writer.close()
    await world.is_served()


async def test_subscriptions_are_bounded(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """60,000 of them took a gigabyte."""
    with world._context.socket(zmq.SUB) as greedy:
        greedy.connect(f"tcp://127.0.0.1:{world.ports[0]}")
        for number in range(20_000):
            greedy.subscribe(os.urandom(32) + number.to_bytes(4, "big"))
        await eventually(lambda: "it sent more than 16384 bytes" in caplog.text)
    await world.is_served()


async def test_a_subscriber_that_does_not_read_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_door, "UNREAD_TIMEOUT", 0.2)
    with world._context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.connect(f"tcp://127.0.0.1:{world.ports[0]}")
        sub.subscribe("kv")

        def closed() -> bool:
            world.publisher.publish(BATCH)
            return "it has read nothing" in caplog.text

        await eventually(closed)
    await world.is_served()


async def test_a_subscriber_that_reads_too_slowly_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_door, "MAX_BEHIND", 2**22)
    with world._context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.connect(f"tcp://127.0.0.1:{world.ports[0]}")
        sub.subscribe("kv")

        def closed() -> bool:
            for _ in range(10):
                world.publisher.publish(BATCH)
            return "bytes behind" in caplog.text

        await eventually(closed)
    await world.is_served()


def test_kept_batches_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_KEPT_NBYTES", 2**20)
    publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://lo:0", buffer_steps=100), 0)
    try:
        for _ in range(200):
            publisher.publish(BATCH)
            publisher.publish(KVEventBatch(0.0, []))
        kept = sum(len(message) for _, message in publisher._kept)
        assert 2**19 < kept == publisher._kept_nbytes <= 2**20
    finally:
        publisher.close()


def test_another_process_cannot_pass_by_the_door(tmp_path: Path) -> None:
    publisher = KVEventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/events"), 0)
    try:
        (door,) = publisher._doors
        pid = os.fork()
        if not pid:
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(f"\0{door._inner}")
                other.settimeout(10)
                os._exit(0 if other.recv(10) == b"" else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        publisher.close()
    assert not any(tmp_path.iterdir())
