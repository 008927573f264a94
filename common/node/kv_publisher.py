"""KV events over ZeroMQ, as vLLM's publisher sends them, for tools that are not pdserve's.

PUB      topic │ sequence number, 8 bytes big-endian │ batch
ROUTER   asked:  "" │ first number wanted              (a REQ socket adds the empty frame)
         answers, one for each batch that is kept and then one with the number -1:
         "" │ number │ batch
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from itertools import count

import zmq
import zmq.asyncio

from pdserve.common.config.kv_events import FLAG, KVEventsConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.rpc.kv_events import KVEventBatch, encode_batch

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Publishes the batches of one replica."""

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        """Raises ConfigError: an endpoint cannot be bound."""
        endpoint, replay = config.of_replica(replica)
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._numbers = count()
        self._context = zmq.asyncio.Context()
        self._replay: zmq.asyncio.Socket | None = None
        self._pub: zmq.Socket = zmq.Context.shadow(self._context).socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.LINGER, 0)
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:"):
                self._pub.bind(endpoint)
            else:
                self._pub.connect(endpoint)
            if replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.LINGER, 0)
                self._replay.bind(replay)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{FLAG}: cannot use {endpoint}: {error}") from error
        logger.info("KV events on %s%s", endpoint, f", replayed on {replay}" if replay else "")

    def publish(self, batch: KVEventBatch) -> None:
        """Sends the batch; a subscriber that is too far behind misses it."""
        number, message = next(self._numbers).to_bytes(8, "big"), encode_batch(batch)
        self._kept.append((number, message))
        with suppress(zmq.Again):
            self._pub.send_multipart((self._topic, number, message), zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answers those who missed batches, until cancelled."""
        while self._replay is not None:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a request for KV events is not an empty frame and 8 bytes")
                continue
            client, empty, first = frames
            for number, message in list(self._kept):
                if number >= first:  # big-endian: the order of the numbers
                    await self._replay.send_multipart((client, empty, number, message))
            await self._replay.send_multipart((client, empty, END, b""))

    def close(self) -> None:
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()
