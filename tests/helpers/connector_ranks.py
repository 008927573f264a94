"""A connector on its own: with a rank's cache, and its events."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kv_fakes import Geometry, shared_cache
from pdserve.common.rpc.auth import ClusterKey
from pdserve.kv_transfer.connector import (
    Event,
    KVConnector,
    Progress,
    RankContext,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.layout import CacheView, Piece, Rect
from pdserve.kv_transfer.selection import KEY_PURPOSE

GEOMETRY = Geometry()
RECT = Rect(0, GEOMETRY.layers, 0, GEOMETRY.heads)
ID = b"transfer-id-0001"
SINK_IDS = (4, 9, 2, 7)


def keys(words: str) -> tuple[bytes, ...]:
    """Returns the keys of ranks in a cluster with this cluster key."""
    return ClusterKey(words).derive(KEY_PURPOSE) if words else ()


class Rank:
    def __init__(
        self,
        kind: type[KVConnector] = TCPConnector,
        *,
        fingerprint: str = "same",
        fill: float = 0.0,
        key: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.cache, self._fd = shared_cache(GEOMETRY.shape(RECT), GEOMETRY.dtype)
        self.cache.fill_(fill)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.view = CacheView(self.cache, RECT, self._fd)
        context = RankContext(self.view, "127.0.0.1", fingerprint, self.events.put, keys(key))
        self.connector: Any = kind(context, options or {})

    def expect(self, kind: type[Any], within: float = 30.0) -> Any:
        """Returns the next event that is not only progress."""
        while isinstance(event := self.events.get(timeout=within), Progress):
            if kind is Progress:
                return event
        assert isinstance(event, kind), event
        return event

    def close(self) -> None:
        self.connector.close(5.0)
        os.close(self._fd)


@contextmanager
def ranks() -> Iterator[Callable[..., Rank]]:
    """Yields a function that makes ranks; closes them at the end."""
    made: list[Rank] = []

    def make(*args: Any, **options: Any) -> Rank:
        made.append(Rank(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def submit(source: Rank, sink: Rank, transfer_id: bytes = ID, epoch: int = 1) -> None:
    submit_to(source, sink.connector.endpoint(), transfer_id, epoch)


def submit_to(source: Rank, endpoint: bytes, transfer_id: bytes = ID, epoch: int = 1) -> None:
    source.connector.submit(SourceTransfer(transfer_id, epoch, ((Piece(0, 0, RECT), endpoint),)))
