"""Nodes on a virtual clock as the router sees them, and the KV transfers between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from pdserve.common.core.block_hash import BlockHash, short_hash
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.prefix_index import PrefixIndex
from pdserve.simulate.calibration import Times
from pdserve.simulate.engine import SimulatedEngine


class HashedBlocks:
    """The blocks of a trace's prompt (`policy.Blocks`)."""

    def __init__(self, hashes: Sequence[BlockHash]) -> None:
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: int) -> int:
        return short_hash(self._hashes[index])

    def __iter__(self) -> Iterator[int]:
        return map(short_hash, self._hashes)


class SimulatedNode:
    """A node's engine, which reports its KV events to the router's index (`CacheListener`)."""

    def __init__(
        self, node: Node, engine: SimulatedEngine, index: PrefixIndex, event_delay: float
    ) -> None:
        self.node = node
        self.engine = engine
        self.link_free = 0.0  # time at which its outgoing link is free
        self._index, self._place = index, (node, 0)
        self._delay = event_delay
        self._untold = deque[tuple[Callable[[Hashable, Iterable[int]], object], list[int]]]()
        engine.scheduler.pool.listen(self)

    def stored(self, sequence: EngineSequence, first: int, end: int) -> None:
        self._event(self._index.store, map(short_hash, sequence.block_hashes[first:end]))

    def removed(self, block_hash: BlockHash) -> None:
        self._event(self._index.remove, (short_hash(block_hash),))

    def _event(
        self, change: Callable[[Hashable, Iterable[int]], object], hashes: Iterable[int]
    ) -> None:
        self._untold.append((change, list(hashes)))
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        """Reports the oldest pending event to the router."""
        change, hashes = self._untold.popleft()
        change(self._place, hashes)

    def load(self) -> pb.NodeLoad:
        """Builds the load report, like `common.node.load`."""
        scheduler = self.engine.scheduler
        free = scheduler.pool.num_blocks - scheduler.pool.num_held
        return pb.NodeLoad(
            running=len(scheduler.running) + len(scheduler.remote),
            waiting=len(scheduler.waiting),
            free_blocks=free,
            most_free_blocks=free,
            total_blocks=scheduler.pool.num_blocks,
            waiting_tokens=sum(each.num_pending for each in scheduler.waiting),
            healthy=True,
            routers=1,
            rates=pb.Rates(**self.engine.rates.now._asdict()),
        )


class Stream:
    """The transfer of a prompt's KV: each step's KV moves while the next step computes."""

    def __init__(
        self, source: SimulatedNode, times: Times, num_cached: int, now: Callable[[], float]
    ) -> None:
        """`num_cached`: tokens in the decode node's prefix cache."""
        self._source, self._times, self._now = source, times, now
        self._moved = num_cached

    def computed(self, num_tokens: int) -> None:
        """Records that the KV of the first `num_tokens` tokens is computed."""
        source, new = self._source, max(0, num_tokens - self._moved)
        source.link_free = max(source.link_free, self._now()) + self._times.move(new)
        self._moved += new

    @property
    def landing(self) -> float:
        """The time at which the decode node has all KV."""
        return self._source.link_free + self._times.hand_over
