"""Two nodes without engines: caches, ranks on threads, and a faulty connector."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from pdserve.common.core.errors import NodeError, TransferError
from pdserve.common.engine.messages import CacheShape
from pdserve.common.worker.kv_cache import GroupCache
from pdserve.kv_transfer.blocks import gather, piece_nbytes, scatter
from pdserve.kv_transfer.connector import (
    BlockRun,
    Capabilities,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    RunDigest,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.control.recv_transfer import GroupBlocks, RecvResult
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.sink_client import SinkClient
from pdserve.kv_transfer.control.source import KVSource, SendTransfer
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket
from pdserve.kv_transfer.layout import Rect, Share, rank_rects
from pdserve.kv_transfer.rank.group_connector import GroupConnector
from pdserve.kv_transfer.rank.worker_connector import WorkerConnector, build_worker_connector
from pdserve.kv_transfer.selection import RankConfig

LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 3, 2, 4, 8
FINGERPRINT = "f" * 24


def shared_cache(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns zeros in a memory file, and its descriptor, which the caller closes."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    fd = os.memfd_create("test-kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=dtype).view(shape), fd


@dataclass
class Geometry:
    layers: int = LAYERS
    heads: int = HEADS
    block_size: int = BLOCK_SIZE
    head_dim: int = HEAD_DIM
    num_blocks: int = 16
    dtype: torch.dtype = torch.float32
    planes: int = 2

    def shape(self, rect: Rect) -> tuple[int, ...]:
        layers = rect.layer_end - rect.layer_start
        heads = rect.head_end - rect.head_start
        sizes = (self.num_blocks, heads, self.block_size, self.head_dim)
        return (layers, self.planes, *sizes)

    def cache_shape(self, rect: Rect) -> CacheShape:
        return CacheShape(
            rect.layer_start,
            rect.layer_end,
            rect.head_start,
            rect.head_end,
            self.num_blocks,
            self.block_size,
            self.head_dim,
            str(self.dtype).removeprefix("torch."),
            planes=self.planes,
        )


class FakeNode:
    """The ranks of one node, with `call` and `on_event` like an executor."""

    def __init__(
        self,
        connectors: str,
        tp: int,
        *,
        source: bool,
        geometry: Geometry | None = None,
        fingerprint: str = FINGERPRINT,
        network: FakeNetwork | None = None,
        options: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self._options = options or {}
        self.geometry = geometry or Geometry()
        self.rects = rank_rects(self.geometry.layers, self.geometry.heads, tp)
        self.on_event: Callable[[int, bytes], None] = lambda rank, message: None
        self.caches: list[torch.Tensor] = []
        self.ranks: list[WorkerConnector] = []
        self._fds: list[int] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(tp)]
        self._loop = asyncio.get_running_loop()
        for rank in range(tp):
            self._build(rank, connectors, source, fingerprint, network)

    def _build(
        self, rank: int, names: str, source: bool, fingerprint: str, network: FakeNetwork | None
    ) -> None:
        cache, fd = shared_cache(self.geometry.shape(self.rects[rank]), self.geometry.dtype)
        self.caches.append(cache)
        self._fds.append(fd)
        shape = self.geometry.cache_shape(self.rects[rank])

        def emit(message: bytes) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.on_event, rank, message)

        connectors = {name: dict(self._options.get(name, {})) for name in names.split(",")}
        config = msgspec.msgpack.encode(RankConfig(connectors, fingerprint, source=source))
        built = build_worker_connector(
            [GroupCache(cache, shape)], fd, rank, "127.0.0.1", config, emit
        )
        self.ranks.append(built)
        fakes = [each for each in self.children(rank).values() if isinstance(each, FakeConnector)]
        if network is not None and fakes:
            for fake in fakes:
                fake.join(network)
            self.ranks[rank] = WorkerConnector({0: GroupConnector(self.multi(rank), source)})

    def multi(self, rank: int = 0) -> MultiConnector:
        connector = self.ranks[rank].groups[0]._connector
        assert isinstance(connector, MultiConnector)
        return connector

    def children(self, rank: int = 0) -> dict[str, KVConnector]:
        return self.multi(rank).children

    async def call(self, rank: int, message: bytes) -> bytes:
        """Calls a rank like an executor; a single rank is in the node's process."""
        alone = len(self.ranks) == 1
        if alone and (answer := self.ranks[rank].handle_at_once(message)) is not None:
            return answer
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[rank], self.ranks[rank].handle, message)

    def fill_random(self, seed: int = 0) -> torch.Tensor:
        """Fills the ranks' caches from a random cache of the whole model; returns it."""
        geometry = self.geometry
        whole = Rect(0, geometry.layers, 0, geometry.heads)
        generator = torch.Generator().manual_seed(seed)
        full = torch.randn(geometry.shape(whole), generator=generator).to(geometry.dtype)
        for cache, rect in zip(self.caches, self.rects, strict=True):
            cache.copy_(full[:, :, :, rect.head_start : rect.head_end])
        return full

    def close(self) -> None:
        for rank in self.ranks:
            rank.close(5.0)
        for thread in self._threads:
            thread.shutdown()
        for fd in self._fds:
            os.close(fd)


@dataclass
class Pair:
    """A prefill and a decode node whose control halves talk directly."""

    source_node: FakeNode
    sink_node: FakeNode
    source: KVSource
    sink: KVSink
    peer: FakeSinkClient
    sink_frees: int = 0
    handoffs: list[SendTransfer] = field(default_factory=list)
    arrivals: dict[bytes, asyncio.Future[RecvResult]] = field(default_factory=dict)

    @property
    def freed(self) -> list[str]:
        """Returns the owner of each freeing of blocks."""
        quiet = sum(handoff.outcome.done() for handoff in self.handoffs)
        return ["sink"] * self.sink_frees + ["source"] * quiet

    def note_sink_free(self) -> None:
        self.sink_frees += 1

    def begin(self, ticket: Ticket) -> SendTransfer:
        self.handoffs.append(self.source.begin(ticket))
        return self.handoffs[-1]

    async def reserve(
        self,
        tokens: int,
        first: int,
        ids: Sequence[int],
        on_freed: Callable[[], None],
        adapter: str = "",
    ) -> Ticket:
        blocks = [GroupBlocks(first, tuple(ids))]
        ticket, arrival = await self.sink.reserve(tokens, blocks, on_freed, adapter)
        self.arrivals[ticket.transfer_id] = arrival
        return ticket

    async def landed(self, transfer_id: bytes) -> RecvResult:
        """Waits for the sink's outcome."""
        return await asyncio.shield(self.arrivals[transfer_id])

    async def close(self) -> None:
        await self.source.close()
        await self.sink.close()
        self.source_node.close()
        self.sink_node.close()


class FakeSinkClient(SinkClient):
    """Calls a sink by function calls, until the link is cut."""

    def __init__(self, sink: KVSink) -> None:
        self._sink = sink
        self.cut_off = False

    def _check(self) -> None:
        if self.cut_off:
            raise NodeError("the link is cut", code="PEER_LOST")

    def connect(self, ticket: Ticket) -> None: ...

    async def commit(self, ticket: Ticket, payload: Any, digests: Sequence[RunDigest]) -> int:
        self._check()
        return await self._sink.commit(ticket.transfer_id, ticket.epoch, payload, digests)

    async def renew(self, ticket: Ticket, committed: bool = False) -> int:
        self._check()
        return self._sink.renew(ticket.transfer_id, ticket.epoch, committed)

    async def abort(self, ticket: Ticket, reason: str) -> None:
        self._check()
        self._sink.abort(ticket.transfer_id, ticket.epoch, reason)

    async def retarget(self, ticket: Ticket) -> Ticket:
        self._check()
        return await self._sink.retarget(ticket.transfer_id, ticket.epoch)


def make_pair(
    connector: str,
    source_tp: int = 1,
    sink_tp: int = 1,
    *,
    lease_s: float = 60.0,
    geometry: Geometry | None = None,
    faults: Mapping[str, Any] | None = None,
    digests: bool = True,
    sink_connector: str = "",
    options: Mapping[str, dict[str, Any]] | None = None,
    address: str = "test:0",
) -> Pair:
    """`connector`: one or several, separated by commas; the sink's default to the source's.
    `options`: connector name → its options."""
    network = FakeNetwork(dict(faults)) if faults is not None else None
    common: Any = {"geometry": geometry, "network": network, "options": options}
    source_node = FakeNode(connector, source_tp, source=True, **common)
    sink_node = FakeNode(sink_connector or connector, sink_tp, source=False, **common)
    sink = KVSink(
        [
            RankEndpoint(rank, rect, sink_node.ranks[rank].groups[0].endpoint)
            for rank, rect in enumerate(sink_node.rects)
        ],
        fingerprint=FINGERPRINT,
        block_size=sink_node.geometry.block_size,
        address=address,
        lease_s=lease_s,
        call=sink_node.call,
        digests=digests,
    )

    peer = FakeSinkClient(sink)
    source = KVSource(
        [Share(*each) for each in enumerate(source_node.rects)],
        fingerprint=FINGERPRINT,
        block_size=source_node.geometry.block_size,
        lease_s=lease_s,
        call=source_node.call,
        sink=peer,
    )
    source_node.on_event = source.on_event
    sink_node.on_event = sink.on_event
    return Pair(source_node, sink_node, source, sink, peer)


class FakeNetwork:
    """Connects fake connectors, with faults.

    `faults`: `lose` (runs never arrive), `duplicate` (every event comes twice), `fail_after`
    (runs after which the source fails), `delay` (seconds before a run lands), `corrupt` (a
    byte of each run is flipped), `refuse` (sinks reject transfers).
    """

    def __init__(self, faults: dict[str, Any]) -> None:
        self.faults = faults
        self.sinks: dict[bytes, FakeConnector] = {}


class FakeConnector(KVConnector):
    """Moves blocks by function calls, with the faults of `FakeNetwork`."""

    capabilities = Capabilities(push=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self.network = FakeNetwork({})
        self.accepted: dict[bytes, SinkTransfer] = {}
        self.submitted: dict[bytes, SourceTransfer] = {}
        self.missing: dict[bytes, int] = {}
        self.runs = 0
        self._timers: list[threading.Timer] = []

    def join(self, network: FakeNetwork) -> None:
        self.network = network

    def emit(self, event: Event) -> None:
        for _ in range(2 if self.network.faults.get("duplicate") else 1):
            self.context.emit(event)

    def endpoint(self) -> bytes:
        name = str(id(self)).encode()
        self.network.sinks[name] = self
        return name

    def accept(self, transfer: SinkTransfer) -> None:
        if self.network.faults.get("refuse"):
            raise TransferError("no", code="CONNECT_FAILED")
        view = self.context.view
        self.accepted[transfer.transfer_id] = transfer
        self.missing[transfer.transfer_id] = piece_nbytes(
            view.cache, view.rect, len(transfer.block_ids)
        )

    def submit(self, transfer: SourceTransfer) -> None:
        self.submitted[transfer.transfer_id] = transfer

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        transfer = self.submitted.get(transfer_id)
        if transfer is None:
            return
        self.runs += 1
        if self.runs > self.network.faults.get("fail_after", 1 << 30):
            self.emit(Failed(transfer_id, transfer.epoch, "PEER_LOST", "decode", True, "gone"))
            return
        for piece, endpoint in transfer.pieces:
            data = gather(self.context.view, piece.rect, block_ids)
            sink = self.network.sinks[endpoint]
            if delay := self.network.faults.get("delay"):
                timer = threading.Timer(delay, sink.take, (transfer, piece.rect, run, data))
                self._timers.append(timer)
                timer.start()
            else:
                sink.take(transfer, piece.rect, run, data)
        if last:
            self.emit(Sent(transfer_id, transfer.epoch, 0, 0.0))

    def take(self, source: SourceTransfer, rect: Rect, run: BlockRun, data: torch.Tensor) -> None:
        transfer = self.accepted.get(source.transfer_id)
        if transfer is None or self.network.faults.get("lose"):
            return
        staged = data.contiguous().view(torch.uint8).reshape(-1)
        if self.network.faults.get("corrupt"):
            staged[0] ^= 1
        start = run.first - transfer.first_block
        ids = transfer.block_ids[start : start + run.count]
        scatter(self.context.view, rect, ids, staged)
        self.missing[source.transfer_id] -= len(staged)
        self.emit(Progress(source.transfer_id, source.epoch, len(staged)))
        if self.missing[source.transfer_id] == 0:
            self.emit(Landed(source.transfer_id, source.epoch, len(staged)))

    def quiesce(self, transfer_id: bytes) -> None:
        self.accepted.pop(transfer_id, None)
        self.submitted.pop(transfer_id, None)

    def close(self, deadline: float) -> None:
        for timer in self._timers:
            timer.join(deadline)
