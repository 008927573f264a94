"""A node under a virtual clock, as the router sees it, and what moves from one to another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from pdserve.common.core.block_hash import BlockHash, short_hash
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.prefix_index import PrefixIndex
from pdserve.simulate.calibration import Times
from pdserve.simulate.engine import SimulatedEngine


class HashedBlocks:
    """The blocks of a trace's prompt (`prefix_index.Blocks`)."""

    def __init__(self, hashes: Sequence[BlockHash]) -> None:
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: int) -> int:
        return short_hash(self._hashes[index])


class SimulatedNode:
    """A node's engine; it tells the router's index what it caches (`CacheListener`)."""

    def __init__(
        self, node: Node, engine: SimulatedEngine, index: PrefixIndex, event_delay: float
    ) -> None:
        self.node = node
        self.engine = engine
        self.link_free = 0.0  # when what it sends is sent
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
        """Tells the router of the oldest event."""
        change, hashes = self._untold.popleft()
        change(self._place, hashes)

    def load(self) -> pb.NodeLoad:
        """Makes its report, as `common.node.load` does."""
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
    """A prompt's KV on its way: what each step computes is moved while the next one computes."""

    def __init__(
        self, source: SimulatedNode, times: Times, num_cached: int, now: Callable[[], float]
    ) -> None:
        """`num_cached`: tokens that the decode node has."""
        self._source, self._times, self._now = source, times, now
        self._moved = num_cached

    def computed(self, num_tokens: int) -> None:
        """Notes that so many of the prompt's tokens have their KV."""
        source, new = self._source, max(0, num_tokens - self._moved)
        source.link_free = max(source.link_free, self._now()) + self._times.move(new)
        self._moved += new

    @property
    def landing(self) -> float:
        """When the decode node can begin."""
        return self._source.link_free + self._times.hand_over
