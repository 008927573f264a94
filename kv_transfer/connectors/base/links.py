"""The source rank's side: transfers under way, and the links (thread, queue, connection) to each
sink rank: one, or as many as there are streams, which share the layers of a piece. A link's
connection outlives its transfers, which take turns on it, frame by frame."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Progress,
    Sent,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.frame import Frame, Kind
from pdserve.kv_transfer.connectors.base.intake import Pulse, as_transfer_error
from pdserve.kv_transfer.connectors.base.staging import parts
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import Piece

Target = tuple[bytes, int]  # a sink rank's endpoint, and which of the streams to it
NO_BLOCKS = BlockRun(0, 0)
IDLE_S = 60.0  # after which an unused connection is closed
FRAME_NBYTES = 16 << 20  # at most, but for a frame of one block: what staging memory it takes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer under way."""

    transfer: SourceTransfer
    routes: tuple[tuple[Piece, Target], ...]  # which part of it goes where
    pending: int  # parts whose last run is not delivered
    gate: Gate = field(default_factory=Gate)
    nbytes: int = 0
    started: float = 0.0
    over: bool = False  # sent or failed: the event was emitted
    next_block: int = 0  # blocks before it were announced
    complete: bool = False  # the last run was announced

    def announce(self, run: BlockRun, last: bool) -> bool:
        """Whether the run is news: the transfer is not over, it was not announced before."""
        repeated = run.count > 0 and run.first < self.next_block
        if self.over or self.complete or repeated:
            return False
        self.next_block = run.first + run.count
        self.complete = last
        return True

    def frame(self, kind: Kind, piece: Piece, run: BlockRun) -> Frame:
        transfer = self.transfer
        return Frame(kind, transfer.transfer_id, transfer.epoch, piece.rect, run.first, run.count)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One frame of a part of a run; the first of each part is empty and announces it."""

    outgoing: Outgoing
    piece: Piece
    run: BlockRun = NO_BLOCKS
    block_ids: tuple[int, ...] = ()
    last: bool = False


class Channel(ABC):
    """A connection as a link uses it, from one thread. Errors: OSError, TransferError."""

    @abstractmethod
    def begin(self, frame: Frame) -> None:
        """Tells the sink that this connection answers for a piece."""

    @abstractmethod
    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        """Moves blocks; returns bytes moved: 0 when the gate is shut."""

    def watch(self, on_moved: Callable[[], None]) -> None:  # noqa: B027 (optional)
        """Calls `on_moved` now and then while a frame that takes long moves. Default: frames are
        quick."""

    @abstractmethod
    def alive(self) -> bool: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked call fail; from any thread."""

    @abstractmethod
    def close(self) -> None: ...


class Links:
    """All links and transfers of one source rank. Thread-safe."""

    def __init__(
        self, dial: Callable[[bytes], Channel], emit: Callable[[Event], None], cache: torch.Tensor
    ) -> None:
        self._dial = dial
        self._emit = emit
        self._cache = cache
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, Outgoing] = {}
        self._links: dict[Target, Link] = {}
        self._closing = False
        self.streams = 1  # to each sink rank

    def submit(self, transfer: SourceTransfer) -> None:
        routes = tuple(
            (replace(piece, rect=rect), (endpoint, stream))
            for piece, endpoint in transfer.pieces
            for stream, rect in enumerate(piece.rect.split_layers(self.streams))
        )
        outgoing = Outgoing(transfer, routes, len(routes))
        with self._lock:
            if transfer.transfer_id in self._outgoing or self._closing:
                return
            self._outgoing[transfer.transfer_id] = outgoing
            for piece, target in routes:
                self._put(target, Delivery(outgoing, piece))

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        with self._lock:
            outgoing = self._outgoing.get(transfer_id)
            if outgoing is None or not outgoing.announce(run, last):
                return
            outgoing.started = outgoing.started or time.monotonic()
            for piece, target in outgoing.routes:
                for delivery in self._frames(outgoing, piece, run, block_ids, last):
                    self._put(target, delivery)
            if not outgoing.routes and last:
                outgoing.over = True
        if outgoing.over:
            self._emit(Sent(transfer_id, outgoing.transfer.epoch, 0, 0.0))

    def _frames(
        self,
        outgoing: Outgoing,
        piece: Piece,
        run: BlockRun,
        block_ids: tuple[int, ...],
        last: bool,
    ) -> Iterator[Delivery]:
        """A run, cut so that a frame is soon over."""
        cuts = list(parts(self._cache, piece.rect, run.count, FRAME_NBYTES)) or [slice(0, 0)]
        for cut in cuts:
            part = BlockRun(run.first + cut.start, cut.stop - cut.start)
            yield Delivery(outgoing, piece, part, block_ids[cut], last and cut is cuts[-1])

    def _put(self, target: Target, delivery: Delivery) -> None:
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = Link(target, self._dial, self)
        link.queue.put(delivery)

    def moving(self, waiting: set[Outgoing]) -> None:
        """Bytes go out on a link: those of its transfers that wait their turn live, too."""
        for each in waiting:
            if not each.over:
                self._emit(Progress(each.transfer.transfer_id, each.transfer.epoch, 0))

    def delivered(self, delivery: Delivery, nbytes: int) -> None:
        outgoing, transfer = delivery.outgoing, delivery.outgoing.transfer
        with self._lock:
            outgoing.nbytes += nbytes
            outgoing.pending -= delivery.last
            done = outgoing.pending == 0 and not outgoing.over
            outgoing.over = outgoing.over or done
        self._emit(Progress(transfer.transfer_id, transfer.epoch, nbytes))
        if done:
            seconds = time.monotonic() - outgoing.started
            self._emit(Sent(transfer.transfer_id, transfer.epoch, outgoing.nbytes, seconds))

    def fail(self, outgoing: Outgoing, error: TransferError) -> None:
        """Ends one transfer, if it is not over."""
        transfer = outgoing.transfer
        with self._lock:
            if outgoing.over:
                return
            outgoing.over = True
        fault = (error.code, error.blame.value, error.retryable, error.message)
        self._emit(Failed(transfer.transfer_id, transfer.epoch, *fault))

    def retire(self, link: Link) -> bool:
        """Whether the link may end: nothing was queued meanwhile."""
        with self._lock:
            if not link.queue.empty():
                return False
            del self._links[link.target]
            return True

    def forget(self, transfer_id: bytes) -> None:
        """Returns when no thread reads the transfer's blocks; none will."""
        with self._lock:
            outgoing = self._outgoing.pop(transfer_id, None)
            links = list(self._links.values())
        if outgoing is not None:
            outgoing.over = True
            for link in links:
                link.queue.drop(outgoing)
            outgoing.gate.close()

    def close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        with self._lock:
            self._closing = True
            links = list(self._links.values())
        for link in links:
            link.stop()
        for link in links:
            link.thread.join(max(0.0, end - time.monotonic()))


class Turns:
    """Deliveries of one link. Those of one transfer come out in order, and transfers by turns: one
    with much to send keeps no other waiting. Any thread may put, one gets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: OrderedDict[Outgoing, deque[Delivery]] = OrderedDict()
        self._closed = False

    def put(self, delivery: Delivery) -> None:
        with self._changed:
            self._queues.setdefault(delivery.outgoing, deque()).append(delivery)
            self._changed.notify()

    def get(self, timeout: float) -> Delivery | None:
        """None: it is closed. Raises queue.Empty."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._queues or self._closed, timeout):
                raise queue.Empty
            if self._closed:
                return None
            outgoing, deliveries = self._queues.popitem(last=False)
            delivery = deliveries.popleft()
            if deliveries:
                self._queues[outgoing] = deliveries
            return delivery

    def transfers(self) -> set[Outgoing]:
        """Those that wait for their turn."""
        with self._changed:
            return set(self._queues)

    def drop(self, outgoing: Outgoing) -> None:
        """A transfer that was given up."""
        with self._changed:
            self._queues.pop(outgoing, None)

    def empty(self) -> bool:
        with self._changed:
            return not self._queues

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


class Link:
    """One stream to one sink rank. Deliveries go out one at a time."""

    def __init__(self, target: Target, dial: Callable[[bytes], Channel], links: Links) -> None:
        self.target = target
        self.queue = Turns()
        self._dial = dial
        self._links = links
        self._channel: Channel | None = None
        self._live: set[Outgoing] = set()  # transfers the connection answers for
        self.thread = threading.Thread(target=self._run, name="kv-source", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                try:
                    delivery = self.queue.get(timeout=IDLE_S)
                except queue.Empty:
                    self._live = {each for each in self._live if not each.over}
                    if not self._live and self._links.retire(self):
                        return
                    continue
                if delivery is None:
                    return
                if not delivery.outgoing.over:
                    self._serve(delivery)
        finally:
            self._disconnect()

    def _serve(self, delivery: Delivery) -> None:
        try:
            if not delivery.run.count and not delivery.last:
                self._begin(delivery)
            else:
                self._deliver(delivery)
        except Exception as error:
            self._broken(delivery.outgoing, as_transfer_error(error, Blame.DECODE))

    def _begin(self, delivery: Delivery) -> None:
        """Announces a piece; a kept connection that turns out dead is replaced once."""
        frame = delivery.outgoing.frame(Kind.BEGIN, delivery.piece, delivery.run)
        if self._channel is not None and not self._announced(self._channel, frame):
            self._lose(as_transfer_error(ConnectionError("the connection broke"), Blame.DECODE))
        if self._channel is None:
            self._connect().begin(frame)
        self._live = {each for each in self._live if not each.over} | {delivery.outgoing}

    def _announced(self, kept: Channel, frame: Frame) -> bool:
        if not kept.alive():
            return False
        try:
            kept.begin(frame)
        except OSError:
            return False
        return True

    def _connect(self) -> Channel:
        try:
            self._channel = self._dial(self.target[0])
        except OSError as error:
            raise TransferError(
                f"cannot connect to the decode rank: {error}",
                code="CONNECT_FAILED",
                blame=Blame.DECODE,
                retryable=True,
            ) from error
        self._channel.watch(Pulse(lambda: self._links.moving(self._live | self.queue.transfers())))
        return self._channel

    def _deliver(self, delivery: Delivery) -> None:
        outgoing, nbytes = delivery.outgoing, 0
        if self._channel is None or outgoing not in self._live:
            raise ConnectionError("the connection was lost before")
        if delivery.run.count:
            frame = outgoing.frame(Kind.DATA, delivery.piece, delivery.run)
            nbytes = self._channel.deliver(frame, delivery.block_ids, outgoing.gate)
        if delivery.last:
            self._live.discard(outgoing)
        self._links.delivered(delivery, nbytes)

    def _broken(self, outgoing: Outgoing, error: TransferError) -> None:
        logger.warning("KV connection failed: %s", error)
        self._links.fail(outgoing, error)
        self._lose(error)

    def _lose(self, error: TransferError) -> None:
        """Nothing more can be said on this connection: all its transfers fail."""
        self._disconnect()
        for each in self._live:
            self._links.fail(each, error)
        self._live.clear()

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def stop(self) -> None:
        self.queue.close()
        if (channel := self._channel) is not None:
            channel.interrupt()
