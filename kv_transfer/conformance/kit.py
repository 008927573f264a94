"""The kit that a check gets: it makes ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pdserve.kv_transfer.conformance.caches import Geometry, MemoryCache
from pdserve.kv_transfer.conformance.ends import KEYS, End, LocalEnd, Target
from pdserve.kv_transfer.conformance.nodes import KitNode, Pair
from pdserve.kv_transfer.conformance.remote import Process, RemoteEnd
from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.layout import Rect

GEOMETRY = Geometry()


class Processes:
    """Starts processes for remote ranks ahead, since a start takes seconds."""

    def __init__(self, count: int) -> None:
        self._idle = [Process() for _ in range(count)]

    def take(self) -> Process:
        return self._idle.pop() if self._idle else Process()

    def give_back(self, process: Process) -> None:
        self._idle.append(process)

    def close(self) -> None:
        for process in self._idle:
            process.kill()


class Kit:
    """Makes ranks of the connector under test."""

    def __init__(self, target: Target, processes: Processes) -> None:
        self.target = target
        self._processes = processes
        self._ends: list[End] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.target.load().capabilities

    def node(
        self,
        rects: Sequence[Rect] | None = None,
        geometry: Geometry = GEOMETRY,
        fingerprint: str = "same",
        keys: tuple[bytes, ...] = KEYS,
    ) -> KitNode[LocalEnd]:
        """Makes ranks in this process; by default one that covers all."""
        ends = []
        for rect in rects or (geometry.rect,):
            ends.append(LocalEnd(self.target, MemoryCache(geometry, rect), fingerprint, keys))
            self._ends.append(ends[-1])
        return KitNode(geometry, ends)

    def pair(self, geometry: Geometry = GEOMETRY) -> Pair[LocalEnd, LocalEnd]:
        """Makes one rank on either side."""
        return Pair(self.node(geometry=geometry), self.node(geometry=geometry))

    def remote(self, geometry: Geometry = GEOMETRY) -> KitNode[RemoteEnd]:
        """Makes one rank in its own process; the test requests the fixture `processes`."""
        cache = MemoryCache(geometry, geometry.rect)
        end = RemoteEnd(self.target, cache, self._processes.take())
        self._ends.append(end)
        return KitNode(geometry, [end])

    def close(self) -> None:
        """Closes all ranks and ignores errors: another test checks `close`."""
        for end in self._ends:
            with contextlib.suppress(Exception):
                end.close()
                if isinstance(end, RemoteEnd):
                    self._processes.give_back(end.process)
            end.cache.close()
