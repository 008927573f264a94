"""The source rank's side: transfers under way, and the workers that deliver them.

A worker is a thread with a queue and a connection. There is one for each stream to each sink rank;
several streams share the layers of a piece. Transfers take turns on a connection, frame by frame,
and it outlives them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.connector import (
    BlockRun,
    Failed,
    Progress,
    RankContext,
    RunDigest,
    Sent,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.channel import (
    FRAME_NBYTES,
    NO_HASH,
    Channel,
    FrameHash,
    Heartbeat,
    as_transfer_error,
    parts,
    wanted_hash,
)
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import Piece

StreamKey = tuple[bytes, int]  # a sink rank's endpoint, and which of the streams to it
NO_BLOCKS = BlockRun(0, 0)
IDLE_S = 60.0  # after which an unused connection is closed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OutboundTransfer:
    """Tracks one transfer under way."""

    transfer: SourceTransfer
    targets: tuple[tuple[Piece, StreamKey], ...]  # each part with its destination
    pending: int  # parts without a delivered last run
    gate: Gate = field(default_factory=Gate)
    nbytes: int = 0
    digests: list[RunDigest] = field(default_factory=list)
    started: float = 0.0
    over: bool = False  # sent or failed: the event was emitted
    next_block: int = 0  # blocks before it were announced
    complete: bool = False  # the last run was announced

    def announce(self, run: BlockRun, last: bool) -> bool:
        """Notes a run; returns False if it was announced before or the transfer is over."""
        repeated = run.count > 0 and run.first < self.next_block
        if self.over or self.complete or repeated:
            return False
        self.next_block = run.first + run.count
        self.complete = last
        return True


@dataclass(frozen=True, slots=True)
class SendTask:
    """Asks a worker for one frame of a part; the first frame of each part announces it and has no
    blocks."""

    outbound: OutboundTransfer
    piece: Piece
    run: BlockRun = NO_BLOCKS
    block_ids: tuple[int, ...] = ()
    last: bool = False
    hashed: bool = False  # as it is sent
    offered: int = 0  # bytes of it that were sent when it was queued

    def frame(self, kind: FrameKind) -> Frame:
        transfer, run = self.outbound.transfer, self.run
        return Frame(
            kind, transfer.transfer_id, transfer.epoch, self.piece.rect, run.first, run.count
        )


class Sender:
    """Owns all transfers and workers of one source rank. It is thread-safe."""

    def __init__(self, dial: Callable[[bytes], Channel], context: RankContext) -> None:
        self._dial = dial
        self._context = context
        self._emit = context.emit
        self._lock = threading.Lock()
        self._outbound: dict[bytes, OutboundTransfer] = {}
        self._workers: dict[StreamKey, SendWorker] = {}
        self._closing = False
        self.streams = 1  # to each sink rank

    def submit(self, transfer: SourceTransfer) -> None:
        targets = tuple(
            (replace(piece, rect=rect), (endpoint, stream))
            for piece, endpoint in transfer.pieces
            for stream, rect in enumerate(piece.rect.split_layers(self.streams))
        )
        outbound = OutboundTransfer(transfer, targets, len(targets))
        with self._lock:
            if transfer.transfer_id in self._outbound or self._closing:
                return
            self._outbound[transfer.transfer_id] = outbound
            for piece, target in targets:
                self._put(target, SendTask(outbound, piece))

    def ready(
        self,
        transfer_id: bytes,
        run: BlockRun,
        block_ids: tuple[int, ...],
        last: bool,
        hashed: bool = False,
    ) -> None:
        with self._lock:
            outbound = self._outbound.get(transfer_id)
            if outbound is None or not outbound.announce(run, last):
                return
            outbound.started = outbound.started or time.monotonic()
            for piece, target in outbound.targets:
                for task in self._cut(SendTask(outbound, piece, run, block_ids, last, hashed)):
                    self._put(target, task)
            if not outbound.targets and last:
                outbound.over = True
        if outbound.over:
            self._emit(Sent(transfer_id, outbound.transfer.epoch, 0, 0.0))

    def _cut(self, whole: SendTask) -> Iterator[SendTask]:
        """Cuts a run into frames that do not take long."""
        run, cache = whole.run, self._context.view.cache
        cuts = list(parts(cache, whole.piece.rect, run.count, FRAME_NBYTES)) or [slice(0, 0)]
        for cut in cuts:
            yield replace(
                whole,
                run=BlockRun(run.first + cut.start, cut.stop - cut.start),
                block_ids=whole.block_ids[cut],
                last=whole.last and cut is cuts[-1],
            )

    def _put(self, target: StreamKey, task: SendTask) -> None:
        worker = self._workers.get(target)
        if worker is None:
            worker = self._workers[target] = SendWorker(target, self._dial, self)
        worker.put(task)

    def moving(self, waiting: set[OutboundTransfer]) -> None:
        """Emits Progress for the `waiting` transfers of a connection on which bytes go out."""
        for each in waiting:
            if not each.over:
                self._emit(Progress(each.transfer.transfer_id, each.transfer.epoch, 0))

    def wanted_hash(self, task: SendTask) -> FrameHash:
        if not task.hashed:
            return NO_HASH
        return wanted_hash(self._context.fingerprint, task.frame(FrameKind.DATA))

    def delivered(self, task: SendTask, nbytes: int, made: bytes | None = None) -> None:
        """Counts what was delivered; `made` is its hash, if that was wanted."""
        outbound, transfer, piece = task.outbound, task.outbound.transfer, task.piece
        with self._lock:
            outbound.nbytes += nbytes
            if made is not None:
                outbound.digests.append(RunDigest(piece.sink, piece.rect, task.run, made))
            outbound.pending -= task.last
            done = outbound.pending == 0 and not outbound.over
            outbound.over = outbound.over or done
        ids = transfer.transfer_id, transfer.epoch
        if done:
            seconds, digests = time.monotonic() - outbound.started, tuple(outbound.digests)
            self._emit(Sent(*ids, outbound.nbytes, seconds, digests))
        else:
            self._emit(Progress(*ids, nbytes))

    def fail(self, outbound: OutboundTransfer, error: TransferError) -> None:
        """Fails one transfer, unless it is over."""
        with self._lock:
            if outbound.over:
                return
            outbound.over = True
        self._emit(Failed.of(outbound.transfer.transfer_id, outbound.transfer.epoch, error))

    def retire(self, worker: SendWorker) -> bool:
        """Removes an idle worker; returns False if a task was queued meanwhile."""
        with self._lock:
            if not worker.queue.empty():
                return False
            del self._workers[worker.target]
            return True

    def forget(self, transfer_id: bytes) -> None:
        """Forgets a transfer; returns when no thread reads its blocks and none will."""
        with self._lock:
            outbound = self._outbound.pop(transfer_id, None)
            workers = list(self._workers.values())
        if outbound is not None:
            outbound.over = True
            for worker in workers:
                worker.queue.drop(outbound)
            outbound.gate.close()

    def close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        with self._lock:
            self._closing = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.thread.join(max(0.0, end - time.monotonic()))


class FairQueue:
    """Queues the tasks of one worker. Tasks of one transfer come out in order, and transfers take
    turns, so a large one does not delay the others. Any thread may put, one thread gets. A task
    that was offered is the first and stays: the peer answers it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: OrderedDict[OutboundTransfer, deque[SendTask]] = OrderedDict()
        self.closed = False
        self._waits = False  # the thread that gets

    def put(self, task: SendTask, offer: Callable[[SendTask], SendTask]) -> None:
        """Queues a task. If the thread that gets has nothing to do, it queues what `offer` returns
        instead; that thread goes on only afterwards."""
        with self._changed:
            if self._waits and not self._queues and not self.closed:
                task = offer(task)
            self._queues.setdefault(task.outbound, deque()).append(task)
            self._changed.notify()

    def get(self, timeout: float) -> SendTask | None:
        """Returns the next task; None if the queue is closed or none came in time."""
        with self._changed:
            self._waits = True
            self._changed.wait_for(lambda: self._queues or self.closed, timeout)
            self._waits = False
            if self.closed or not self._queues:
                return None
            outbound, tasks = self._queues.popitem(last=False)
            task = tasks.popleft()
            if tasks:
                self._queues[outbound] = tasks
            return task

    def transfers(self) -> set[OutboundTransfer]:
        """Returns the transfers that wait for their turn."""
        with self._changed:
            return set(self._queues)

    def drop(self, outbound: OutboundTransfer) -> None:
        """Drops the tasks of a transfer that was cancelled."""
        with self._changed:
            if outbound not in self._queues:
                return
            kept = deque(each for each in self._queues[outbound] if each.offered)
            if kept:
                self._queues[outbound] = kept
            else:
                del self._queues[outbound]

    def empty(self) -> bool:
        with self._changed:
            return not self._queues

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()


class SendWorker:
    """Sends one stream to one sink rank, one task at a time."""

    def __init__(self, target: StreamKey, dial: Callable[[bytes], Channel], sender: Sender) -> None:
        self.target = target
        self.queue = FairQueue()
        self._dial = dial
        self._sender = sender
        self._channel: Channel | None = None
        self._live: set[OutboundTransfer] = set()  # transfers announced on the connection
        self.thread = threading.Thread(target=self._run, name="kv-source", daemon=True)
        self.thread.start()

    def put(self, task: SendTask) -> None:
        self.queue.put(task, self._offer)

    def _offer(self, task: SendTask) -> SendTask:
        """Offers blocks on the thread that announces them: this worker's would have to wake up
        first."""
        outbound, channel = task.outbound, self._channel
        if channel is None or not task.run.count or outbound not in self._live:
            return task
        if not outbound.gate.is_open:
            return task
        return replace(task, offered=channel.offer(task.frame(FrameKind.DATA), task.block_ids))

    def _run(self) -> None:
        try:
            while not self.queue.closed:
                task = self.queue.get(IDLE_S)
                if task is None and self._idle() and self._sender.retire(self):
                    return
                if task is not None and (task.offered or not task.outbound.over):
                    self._do(task)
        finally:
            self._disconnect()

    def _idle(self) -> bool:
        self._live = {each for each in self._live if not each.over}
        return not self._live

    def _do(self, task: SendTask) -> None:
        try:
            if not task.run.count and not task.last:
                self._begin(task)
            else:
                self._deliver(task)
        except Exception as error:
            typed = as_transfer_error(error, Blame.DECODE)
            logger.warning("KV connection failed: %s", typed)
            self._sender.fail(task.outbound, typed)
            self._lose(typed)

    def _begin(self, task: SendTask) -> None:
        """Announces a piece. An idle connection that turns out to be dead is replaced once."""
        frame = task.frame(FrameKind.BEGIN)
        if self._channel is not None and not self._announced(self._channel, frame):
            self._lose(as_transfer_error(ConnectionError("the connection broke"), Blame.DECODE))
        if self._channel is None:
            self._connect().begin(frame)
        self._live = {each for each in self._live if not each.over} | {task.outbound}

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
        self._channel.watch(Heartbeat(self._beat))
        return self._channel

    def _beat(self) -> None:
        self._sender.moving(self._live | self.queue.transfers())

    def _deliver(self, task: SendTask) -> None:
        outbound, nbytes, hash_ = task.outbound, 0, self._sender.wanted_hash(task)
        if self._channel is None or not (task.offered or outbound in self._live):
            raise ConnectionError("the connection was lost before")
        if task.run.count:
            nbytes = self._channel.deliver(
                task.frame(FrameKind.DATA), task.block_ids, outbound.gate, hash_, task.offered
            )
        if task.last:
            self._live.discard(outbound)
        self._sender.delivered(task, nbytes, hash_.made)

    def _lose(self, error: TransferError) -> None:
        """Closes the connection; all its transfers fail."""
        self._disconnect()
        for each in self._live:
            self._sender.fail(each, error)
        self._live.clear()

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def stop(self) -> None:
        self.queue.close()
        if (channel := self._channel) is not None:
            channel.interrupt()
