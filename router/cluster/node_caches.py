"""Knows what nodes have cached: a subscription to each node's KV events.

    KVEvents.Subscribe ─▶ snapshot, then changes ─▶ PrefixIndex          place: (node, replica)

A lost or impossible message makes all events of that node doubtful: they are dropped and counted,
and a new subscription requests a snapshot. Until it arrives the node counts as one without a cache.
Events of one node say nothing about another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import count
from time import perf_counter

import grpc
import msgspec
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    decode_events,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.router.cluster.node import ROLE_NAMES, Node
from pdserve.router.cluster.policy import Blocks
from pdserve.router.cluster.prefix_index import PrefixIndex
from pdserve.router.cluster.registry import Registry

logger = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.5, 30.0  # seconds between two subscriptions, doubled each time
SETTLED = 60.0  # seconds after which the next retry is a first one
AT_ONCE = 256  # blocks that are taken without a look at the clock; some 0.2 ms
# Events of all nodes together get so many seconds of the event loop at a time, then it is others'.
WORK, PAUSE = 0.001, 0.002
SWEEP_PAUSE = 0.01  # seconds after each such time in which cleared places are swept
MAX_RETIRED = 64  # cleared places that are not swept yet; with more, nodes wait
PERIOD = 1.0  # seconds between two checks for registered nodes


class Doubtful(Exception):
    """A node's events are inconsistent. The text is the reason, as a metric's label."""


class NodeCaches:
    """Follows the nodes of some roles, and finds the nodes with a prompt's prefix."""

    def __init__(
        self,
        registry: Registry,
        channels: Channels,
        roles: Collection[int],
        metrics: RouterMetrics,
        index: PrefixIndex | None = None,
    ) -> None:
        self.index = PrefixIndex() if index is None else index
        self._registry = registry
        self._channels = channels
        self._roles = roles
        self._metrics = metrics
        self._following: dict[Node, asyncio.Task[None]] = {}
        self._share = _LoopShare()
        self._cleared = asyncio.Event()
        self._swept = asyncio.Condition()

    def match(self, blocks: Callable[[int], Blocks]) -> Mapping[Node, int]:
        """Returns how many of a prompt's first blocks each node has, on one of its replicas.
        `blocks` makes the prompt's blocks of a size."""
        found: dict[Node, int] = {}
        kinds = {(node.info.block_size, node.info.states_alone) for node in self._following}
        for size, alone in kinds:
            if not size:
                continue
            match = self.index.match_states if alone else self.index.match
            for place, depth in match(blocks(size)).items():
                node: Node = place[0]  # type: ignore[index]
                if (node.info.block_size, node.info.states_alone) == (size, alone):
                    found[node] = max(depth, found.get(node, 0))
        return found

    def num_blocks(self) -> Counter[str]:
        """Returns how many blocks the nodes of each role have, replicas counted apart."""
        counts = Counter({ROLE_NAMES[role]: 0 for role in self._roles})
        for node in self._following:
            places = ((node, replica) for replica in range(node.replicas))
            counts[node.role] += sum(map(self.index.num_blocks, places))
        return counts

    @property
    def wanted(self) -> bool:
        """Whether some role's policy uses the caches."""
        return bool(self._roles)

    async def run(self) -> None:
        """Follows all nodes that are registered, until cancelled."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                self._follow_those_present()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD):
                        await self._registry.wait_for_change()
        finally:
            for task in (sweeping, *self._following.values()):
                task.cancel()

    def _follow_those_present(self) -> None:
        present = {node for node in self._registry.nodes() if node.info.role in self._roles}
        for node in self._following.keys() - present:
            self._following.pop(node).cancel()
        for node in present - self._following.keys():
            self._following[node] = asyncio.create_task(self._follow(node))

    async def _follow(self, node: Node) -> None:
        loop, delay = asyncio.get_running_loop(), FIRST_RETRY
        while True:
            since = loop.time()
            try:
                await self._read(node)
                reason = "ended"
            except Doubtful as error:
                reason = str(error)
                logger.warning("%s: new subscription to its KV events: %s", node.id, reason)
            except grpc.aio.AioRpcError as error:
                reason = "lost"
                logger.info("%s: its KV events: %s", node.id, error.details())
            except asyncio.CancelledError:  # this task's, or the call's, as its channel was closed
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                reason = "lost"
            except Exception:
                reason = "defect"
                logger.exception("%s: its KV events could not be taken", node.id)
            finally:
                self._forget(node)
            self._metrics.kv_event_resyncs.labels(reason).inc()
            await self._until_swept()
            delay = FIRST_RETRY if loop.time() - since > SETTLED else min(2 * delay, LAST_RETRY)
            await asyncio.sleep(delay)

    def _forget(self, node: Node) -> None:
        for replica in range(node.replicas):
            self._clear((node, replica))

    def _clear(self, place: tuple[Node, int]) -> None:
        self.index.clear(place)
        self._cleared.set()

    async def _sweep(self) -> None:
        """Sweeps the index whenever places have been cleared, until cancelled."""
        share = _LoopShare(SWEEP_PAUSE)
        while True:
            await self._cleared.wait()
            self._cleared.clear()
            async with share:
                for _ in self.index.sweep():
                    await share.pause()
            async with self._swept:
                self._swept.notify_all()

    async def _until_swept(self) -> None:
        """Waits while too many places have been cleared: who clears again and again waits for the
        sweeps that it causes."""
        async with self._swept:
            await self._swept.wait_for(lambda: self.index.num_retired < MAX_RETIRED)

    async def _read(self, node: Node) -> None:
        """Returns when the node ends the stream.

        Raises:
            Doubtful: a message is invalid.
        """
        stub = pb_grpc.KVEventsStub(self._channels.get(node.info.address))
        call, begun = stub.Subscribe(pb.KVEventsRequest()), set[int]()
        try:
            for number in count():
                message = await call.read()
                if message is EOF:
                    return
                if message is None or message.number != number:
                    raise Doubtful("malformed" if message is None else "gap")
                try:
                    await self._apply(node, *decode_events(message.batch), begun)
                except msgspec.DecodeError:
                    raise Doubtful("malformed") from None
        finally:
            call.cancel()

    async def _apply(
        self, node: Node, replica: int, events: Iterable[KVEvent], begun: set[int]
    ) -> None:
        """Takes a batch of a replica; `begun`: replicas whose snapshot has begun."""
        if not 0 <= replica < node.replicas:
            raise Doubtful("unknown_replica")
        place = node, replica
        for event in events:
            if isinstance(event, AllBlocksCleared):
                begun.add(replica)
                self._clear(place)
                await self._until_swept()
                continue
            if isinstance(event, BlockStored) and (
                event.block_size != node.info.block_size or replica not in begun
            ):
                raise Doubtful("malformed" if replica in begun else "no_snapshot")
            async with self._share:
                await self._take(place, event)
        if self.index.num_blocks(place) > node.info.num_blocks:
            raise Doubtful("too_many_blocks")

    async def _take(self, place: tuple[Node, int], event: BlockStored | BlockRemoved) -> None:
        for start in range(0, len(event.block_hashes), AT_ONCE):
            hashes = event.block_hashes[start : start + AT_ONCE]
            if isinstance(event, BlockStored):
                self.index.store(place, hashes)
            # What the full index has dropped may be removed, too.
            elif self.index.remove(place, hashes) and not self.index.num_evicted:
                raise Doubtful("unknown_block")
            await self._share.pause()


class _LoopShare:
    """Bounds the time of the event loop that some work takes: in its context is
    one task at a time, and other work runs after each `WORK` seconds."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._lock = asyncio.Lock()
        self._began = self._used = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began = perf_counter()

    async def __aexit__(self, *error: object) -> None:
        self._used += perf_counter() - self._began
        self._lock.release()

    async def pause(self) -> None:
        """Lets other work run if it is due; call it often inside."""
        if self._used + perf_counter() - self._began >= WORK:
            await asyncio.sleep(self._pause)
            self._began, self._used = perf_counter(), 0.0
