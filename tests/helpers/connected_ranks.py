"""A node's ranks without an engine: their caches and real connectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from kv_fakes import FINGERPRINT, FakeSinkClient
from pdserve.common.worker.kv_cache import KVCache
from pdserve.kv_transfer.commands import decode_endpoints
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.source import KVSource
from pdserve.kv_transfer.control.ticket import RankEndpoint
from pdserve.kv_transfer.layout import Rect, Share
from pdserve.kv_transfer.rank.worker_connector import WorkerConnector, build_worker_connector
from pdserve.kv_transfer.selection import RankConfig

LEASE_S = 60.0


class ConnectedRanks:
    """Has `call` and `on_event` like an executor. Owns the caches, one for each rank. `options`:
    the connector's."""

    def __init__(
        self, connector: str, caches: Sequence[KVCache], source: bool, **options: Any
    ) -> None:
        self.on_event: Any = None
        self.caches = caches
        self.ranks: list[WorkerConnector] = []
        loop = asyncio.get_running_loop()
        settings = RankConfig({connector: options}, FINGERPRINT, source=source)
        config = msgspec.msgpack.encode(settings)
        for number, cache in enumerate(caches):

            def emit(message: bytes, number: int = number) -> None:
                loop.call_soon_threadsafe(self.on_event, number, message)

            self.ranks.append(
                build_worker_connector(cache.groups, cache.fd, number, "127.0.0.1", config, emit)
            )

    def rects(self, rank: int) -> list[Rect]:
        """Returns what a rank has of each KV group."""
        return [Rect.of(each.shape) for each in self.caches[rank].groups]

    async def call(self, rank: int, message: bytes) -> bytes:
        return await asyncio.to_thread(self.ranks[rank].handle, message)

    def close(self) -> None:
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            rank.close(5.0)
            cache.close()


def make_sink(node: ConnectedRanks, block_size: int, digests: bool = True) -> KVSink:
    endpoints = [
        RankEndpoint(number, node.rects(number)[group], endpoint, group)
        for number, rank in enumerate(node.ranks)
        for group, endpoint in decode_endpoints(rank.info()).items()
    ]
    sink = KVSink(
        endpoints,
        fingerprint=FINGERPRINT,
        block_size=block_size,
        address="test:0",
        lease_s=LEASE_S,
        digests=digests,
        call=node.call,
    )
    node.on_event = sink.on_event
    return sink


def make_source(node: ConnectedRanks, sink: KVSink, block_size: int) -> KVSource:
    shares = [
        Share(number, rect, group)
        for number in range(len(node.ranks))
        for group, rect in enumerate(node.rects(number))
        if rect.area
    ]
    source = KVSource(
        shares,
        fingerprint=FINGERPRINT,
        block_size=block_size,
        lease_s=LEASE_S,
        call=node.call,
        sink=FakeSinkClient(sink),
    )
    node.on_event = source.on_event
    return source
