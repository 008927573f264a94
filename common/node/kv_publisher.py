"""KV events over ZeroMQ, as vLLM's publisher sends them, for tools that are not pdserve's.

PUB      topic │ sequence number, 8 bytes big-endian │ batch
ROUTER   asked:  "" │ first number wanted              (a REQ socket adds the empty frame)
         answers, one for each batch that is kept and then one with the number -1:
         "" │ number │ batch

Anyone who reaches the sockets may use them, so a `KVEventsDoor` bounds connections, subscriptions
and queues, and asking must not delay the node's steps: all replays together get a small share of
the event loop, and a client that does not read loses its replay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TypeAlias

import zmq
import zmq.asyncio

from pdserve.common.config.kv_events import FLAG, KVEventsConfig, is_bound
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.node.kv_door import KVEventsDoor
from pdserve.common.rpc.kv_events import KVEventBatch, encode_batch

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)

# Replays send a piece of so many messages and bytes, whatever ends it first (about a millisecond),
# and then pause for so many seconds.
PIECE, PIECE_NBYTES, PAUSE = 32, 2**18, 0.005
MAX_REPLAYS = 64  # at a time; further clients wait
UNREAD_TIMEOUT = 10.0  # seconds until a client that reads nothing loses its replay
MAX_ASKED = 1024  # bytes of a frame from a client
MAX_KEPT_NBYTES = 2**26  # of the batches kept for replays

Kept: TypeAlias = deque[tuple[bytes, bytes]]


class KVEventPublisher:
    """Publishes the batches of one replica."""

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        """Raises ConfigError: an endpoint cannot be bound."""
        endpoint, replay = config.of_replica(replica)
        self._topic = config.topic.encode()
        self._kept: Kept = deque(maxlen=config.buffer_steps)
        self._kept_nbytes = 0
        self._numbers = count()
        self._context = zmq.asyncio.Context()
        self._replay: zmq.asyncio.Socket | None = None
        self._pub: zmq.Socket = zmq.Context.shadow(self._context).socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED)
        self._doors: list[KVEventsDoor] = []
        self._subscribers: KVEventsDoor | None = None
        try:
            if is_bound(endpoint):
                self._subscribers = KVEventsDoor(endpoint, self._pub)
                self._doors.append(self._subscribers)
            else:
                self._pub.connect(endpoint)
            if replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.LINGER, 0)
                self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED)
                self._replay.setsockopt(zmq.SNDHWM, 2 * PIECE)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._doors.append(KVEventsDoor(replay, self._replay))
        except (OSError, zmq.ZMQError) as error:
            self.close()
            used = replay if self._replay is not None else endpoint
            raise ConfigError(f"{FLAG}: cannot use {used}: {error.strerror}") from error
        logger.info("KV events on %s%s", endpoint, f", replayed on {replay}" if replay else "")

    def publish(self, batch: KVEventBatch) -> None:
        """Sends the batch; a subscriber that is too far behind misses it."""
        number, message = next(self._numbers).to_bytes(8, "big"), encode_batch(batch)
        self._keep(number, message)
        if self._subscribers is not None:
            self._subscribers.published += len(message)
        with suppress(zmq.Again):
            self._pub.send_multipart((self._topic, number, message), zmq.NOBLOCK)

    def _keep(self, number: bytes, message: bytes) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept_nbytes -= len(self._kept.popleft()[1])
        self._kept.append((number, message))
        self._kept_nbytes += len(message)
        while self._kept_nbytes > MAX_KEPT_NBYTES:
            self._kept_nbytes -= len(self._kept.popleft()[1])

    async def serve(self) -> None:
        """Lets subscribers in and answers those who missed batches, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for door in self._doors:
                group.create_task(door.serve())
            if self._replay is not None:
                group.create_task(Replays(self._replay, self._kept).serve())

    def close(self) -> None:
        for door in self._doors:
            door.close()
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()


@dataclass(slots=True)
class _Replay:
    """One client's answer."""

    wanted: int  # the next number
    last: int  # the last number before the end
    since: float  # when it last took a message


class Replays:
    """Answers the clients of one replay socket in turn. A client that asks again before the end
    gets the newer answer instead."""

    def __init__(
        self, socket: zmq.asyncio.Socket, kept: Kept, now: Callable[[], float] = monotonic
    ) -> None:
        """`kept`: number and encoded batch of the last messages, which others append."""
        self._socket = socket
        self._kept = kept
        self._now = now
        self._replays: dict[bytes, _Replay] = {}
        self._log = LogThrottle(logger)

    async def serve(self) -> None:
        """Answers until cancelled."""
        while True:
            if not self._replays:
                self._begin(await self._socket.recv_multipart())
            await self._begin_others()
            await self._send_piece()
            await asyncio.sleep(PAUSE)

    async def _begin_others(self) -> None:
        with suppress(zmq.Again):
            for _ in range(PIECE):
                if len(self._replays) >= MAX_REPLAYS:
                    return
                self._begin(await self._socket.recv_multipart(zmq.NOBLOCK))

    def _begin(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._log.warning("a request for KV events is not an empty frame and 8 bytes")
            return
        first = int.from_bytes(self._kept[0][0], "big") if self._kept else 0
        wanted = max(first, int.from_bytes(frames[2], "big"))
        self._replays[frames[0]] = _Replay(wanted, first + len(self._kept) - 1, self._now())

    async def _send_piece(self) -> None:
        sent, nbytes = 0, 0
        while self._replays and sent < PIECE and nbytes < PIECE_NBYTES:
            moved = False
            for client, replay in list(self._replays.items()):
                size = await self._send(client, replay)
                moved, sent, nbytes = moved or size > 0, sent + 1, nbytes + size
            if not moved:
                return  # none of them reads

    async def _send(self, client: bytes, replay: _Replay) -> int:
        """Sends the client's next message; returns its bytes, 0: the client does not read."""
        first = int.from_bytes(self._kept[0][0], "big") if self._kept else 0
        replay.wanted = max(replay.wanted, first)
        ends = replay.wanted > replay.last
        number, message = (END, b"") if ends else self._kept[replay.wanted - first]
        try:
            await self._socket.send_multipart((client, b"", number, message), zmq.NOBLOCK)
        except zmq.Again:
            if self._now() - replay.since > UNREAD_TIMEOUT:
                self._log.warning("a client does not read the KV events that it asked for")
                del self._replays[client]
            return 0
        except zmq.ZMQError:  # it is gone
            ends = True
        if ends:
            del self._replays[client]
        replay.wanted, replay.since = replay.wanted + 1, self._now()
        return len(number) + len(message)
