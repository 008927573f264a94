"""A node's KV events: additions to and removals from its replicas' prefix caches.

    KVPool ─ stored, removed ─▶ KVEventLog ─ a batch for each turn of the loop ─┬─▶ ZeroMQ
                                (one for each replica)                          └─▶ Subscription

A log without subscribers does not listen to the pool, so events cost nothing. A router's
subscription begins with a snapshot of the cache. If the router falls too far behind, its unread
batches are dropped and it gets another snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count

import msgspec

from pdserve.common.core.block_hash import BlockHash, short_hash
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    encode_batch,
    num_blocks,
    without_tokens,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb

MAX_BEHIND = 2**17  # blocks in the batches that a router has not read
MAX_BATCH = 2**11  # blocks of an event, and of a message unless one turn of the loop had more
PAUSE = 0.5  # seconds between messages, in which events gather: a message costs the router CPU

Take = Callable[[KVEventBatch], None]


class KVEventLog:
    """Batches the changes of one replica's prefix cache for its subscribers."""

    def __init__(self, replica: int, pool: KVPool, metrics: NodeMetrics) -> None:
        self._replica = replica
        self._pool = pool
        self._metrics = metrics
        self._takers: list[Take] = []
        self._pending: list[KVEvent] = []

    def attach(self, take: Take) -> None:
        """Calls `take` with every later batch; it must not block."""
        self.flush()
        self._takers.append(take)
        self._pool.listen(self)

    def detach(self, take: Take) -> None:
        self._takers.remove(take)
        if not self._takers:
            self._pool.listen(None)
            self._pending = []

    def snapshot(self) -> Iterator[KVEventBatch]:
        """Yields batches of the blocks that are cached at the time of the call."""
        self.flush()
        return self._snapshot(self._pool.cached())

    def _snapshot(self, cached: Sequence[BlockHash]) -> Iterator[KVEventBatch]:
        first: list[KVEvent] = [AllBlocksCleared()]
        for start in range(0, max(1, len(cached)), MAX_BATCH):
            hashes = [short_hash(each) for each in cached[start : start + MAX_BATCH]]
            yield self._batch([*first, BlockStored(hashes, None, [], self._pool.block_size)])
            first = []

    # ---- CacheListener ----------------------------------------------------------------------

    def stored(self, sequence: EngineSequence, first: int, end: int) -> None:
        size = self._pool.block_size
        hashes = sequence.hashes(size)
        for start in range(first, end, MAX_BATCH):
            stop = min(start + MAX_BATCH, end)
            self._add(
                BlockStored(
                    block_hashes=[short_hash(each) for each in hashes[start:stop]],
                    parent_block_hash=short_hash(hashes[start - 1]) if start else None,
                    token_ids=sequence.token_ids[start * size : stop * size],
                    block_size=size,
                    lora_name=sequence.adapter or None,
                )
            )

    def removed(self, block_hash: BlockHash) -> None:
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved) and len(last.block_hashes) < MAX_BATCH:
            last.block_hashes.append(short_hash(block_hash))
        else:
            self._add(BlockRemoved([short_hash(block_hash)]))

    def _add(self, event: KVEvent) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(event)

    def flush(self) -> None:
        """Passes the pending events to the subscribers."""
        if not self._pending:
            return
        batch, self._pending = self._batch(self._pending), []
        for event in batch.events:
            self._metrics.kv_events.labels(type(event).__name__).inc()
        for take in self._takers:
            take(batch)

    def _batch(self, events: list[KVEvent]) -> KVEventBatch:
        return KVEventBatch(time.time(), events, self._replica)


class Subscription:
    """The messages for one router, of all replicas of the node."""

    def __init__(self, logs: Sequence[KVEventLog], metrics: NodeMetrics) -> None:
        self._logs = logs
        self._metrics = metrics
        self._stale = True  # it needs a snapshot
        self._caught_up = False  # it has sent all of the last snapshot
        self._snapshot: Iterator[KVEventBatch] = iter(())
        self._pending: deque[KVEventBatch] = deque()
        self._behind = 0  # blocks in the pending batches
        self._wake = asyncio.Event()
        self._ending = asyncio.Event()

    async def messages(self) -> AsyncGenerator[pb.KVEventsMessage, None]:
        """Yields a snapshot and what follows, until `end`."""
        for log in self._logs:
            log.attach(self._take)
        try:
            told = set[int | None]()  # replicas with a message since the last pause
            for number in count():
                while (batch := self._next()) is None and not self._ending.is_set():
                    self._wake.clear()
                    await self._wake.wait()
                if self._ending.is_set() or batch is None:
                    return
                encoded = encode_batch(without_tokens(batch))
                yield pb.KVEventsMessage(number=number, batch=encoded)
                told.add(batch.data_parallel_rank)
                if self._caught_up and not self._others(told):
                    await self._gather()
                    told.clear()
        finally:
            for log in self._logs:
                log.detach(self._take)

    def end(self) -> None:
        self._ending.set()
        self._wake.set()

    def _others(self, told: Collection[int | None]) -> bool:
        """Returns whether to send another message without a pause: one of a replica that is not in
        `told`, or a full one."""
        full = self._behind >= MAX_BATCH
        return full or any(each.data_parallel_rank not in told for each in self._pending)

    async def _gather(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE):
                await self._ending.wait()

    def _take(self, batch: KVEventBatch) -> None:
        self._behind += num_blocks(batch)
        if self._behind > MAX_BEHIND:
            self._stale, self._behind = True, 0
            self._pending.clear()
        elif not self._stale:
            self._pending.append(batch)
        self._wake.set()

    def _next(self) -> KVEventBatch | None:
        if self._stale:
            self._snapshot = chain.from_iterable([log.snapshot() for log in self._logs])
            self._stale, self._behind = False, 0
            self._pending.clear()  # the snapshot has it
            self._metrics.kv_events.labels("Snapshot").inc()
            self._caught_up = False
        if (batch := next(self._snapshot, None)) is not None:
            return batch
        self._caught_up = True
        if not self._pending:
            return None
        return self._next_of_first_replica()

    def _next_of_first_replica(self) -> KVEventBatch:
        """Takes the pending events of the replica that waits longest, up to a full message."""
        first, size, events = self._pending[0], 0, list[KVEvent]()
        kept = deque[KVEventBatch]()
        while self._pending and size < MAX_BATCH:
            batch = self._pending.popleft()
            if batch.data_parallel_rank == first.data_parallel_rank:
                size += num_blocks(batch)
                events += batch.events
            else:
                kept.append(batch)
        self._pending.extendleft(reversed(kept))
        self._behind -= size
        return msgspec.structs.replace(first, events=events)
