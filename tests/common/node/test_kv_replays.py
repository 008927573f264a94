"""Replays of KV events for clients that ask too often, do not read, or send nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdserve.common.config.kv_events import KVEventsConfig
from pdserve.common.node import kv_publisher
from pdserve.common.node.kv_publisher import END, KVEventPublisher
from pdserve.common.rpc.kv_events import BlockRemoved, KVEventBatch

KEPT = 500
FIRST = bytes(8)


class Site:
    """A publisher with KEPT batches, whose replays are served."""

    def __init__(self, folder: Path, blocks: int) -> None:
        self.endpoint = f"ipc://{folder}/replay"
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=self.endpoint,
        )
        self.publisher = KVEventPublisher(config, 0)
        for number in range(KEPT):
            self.publisher.publish(KVEventBatch(float(number), [BlockRemoved([2**63] * blocks)]))
        self.context = zmq.asyncio.Context()
        self.clients: list[zmq.asyncio.Socket] = []  # an unreferenced socket is closed
        self.serving = asyncio.create_task(self.publisher.serve())

    def client(self) -> zmq.asyncio.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(self.endpoint)
        self.clients.append(socket)
        return socket

    async def close(self) -> None:
        self.serving.cancel()
        with suppress(asyncio.CancelledError):
            await self.serving
        self.context.destroy()
        self.publisher.close()


@pytest.fixture(params=[1])
async def site(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(tmp_path, request.param)
    yield made
    await made.close()


async def replay(client: zmq.asyncio.Socket) -> list[bytes]:
    """Returns the numbers of the messages up to the end."""
    await client.send_multipart((b"", FIRST))
    numbers = [b""]
    async with asyncio.timeout(60):
        while numbers[-1] != END:
            numbers.append((await client.recv_multipart())[1])
    return numbers[1:]


async def test_asking_in_a_loop_leaves_the_event_loop_to_the_steps(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 clients that asked 20 times each held the loop for 40 s, with 10,000 batches."""
    turns = [0]  # messages sent in each turn of the loop
    send = zmq.asyncio.Socket.send_multipart

    def counted(socket: zmq.asyncio.Socket, *args: Any, **options: Any) -> Any:
        turns[-1] += 1
        return send(socket, *args, **options)

    clients = [site.client() for _ in range(5)]
    for client in clients:
        for _ in range(5):
            await client.send_multipart((b"", FIRST))
    monkeypatch.setattr(zmq.asyncio.Socket, "send_multipart", counted)
    async with asyncio.timeout(60):
        while sum(turns) < KEPT:
            turns.append(0)
            await asyncio.sleep(0)
    assert max(turns) <= kv_publisher.PIECE + len(clients)


@pytest.mark.parametrize("site", [1000], indirect=True)
async def test_a_client_that_does_not_read_delays_no_other(site: Site) -> None:
    """Every batch arrives, in order, although the replay is longer than the socket's queue."""
    for _ in range(3):
        await site.client().send_multipart((b"", FIRST))
    numbers = await replay(site.client())
    assert numbers == [number.to_bytes(8, "big") for number in range(KEPT)] + [END]


@pytest.mark.parametrize("site", [1000], indirect=True)
async def test_a_client_that_does_not_read_loses_its_replay(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_publisher, "UNREAD_TIMEOUT", 0.1)
    await site.client().send_multipart((b"", FIRST))
    async with asyncio.timeout(60):
        while "does not read" not in caplog.text:
            await asyncio.sleep(0.01)
    assert len(await replay(site.client())) == KEPT + 1


async def test_nonsense_and_clients_that_vanish_do_no_harm(site: Site) -> None:
    for _ in range(50):
        gone = site.client()
        await gone.send_multipart((b"", FIRST))
        await gone.send_multipart((b"x" * 2000,))
        gone.close()
    nonsense = site.client()
    for frames in ((b"",), (b"a", FIRST), (b"", b"9"), (b"", FIRST, b"")):
        await nonsense.send_multipart(frames)
    numbers = await replay(site.client())
    assert all(one < other for one, other in pairwise(numbers)) and len(numbers) == KEPT + 1
