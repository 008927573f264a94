"""The ZeroMQ fan-out: steps, calls and events between a node and ranks in processes of their
own, wherever those run. See `wire.py` for the frames.

start ─ launch all ─ each rank connects and builds ─▶ serving ─ shutdown ─▶ stopped
             │                                          │
             └── a rank fails or dies: kill all, raise ─┴─▶ fail what waits, kill all, on_death
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Container, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import Executor, WorkerSpec
from pdserve.common.distributed.wire import Kind, Link, decode_failure
from pdserve.common.obs.logging import write_log

logger = logging.getLogger(__name__)

_START_LOG_INTERVAL = 15.0  # seconds between two lines about ranks that are still starting
_KILL_TIMEOUT = 5.0  # seconds each part of a stop gets once ranks are killed
MAX_BURST = 32  # messages of ranks taken in one turn of the event loop


class Launcher(Protocol):
    """How ranks come to life, and how it is known that they are dead."""

    death_notice_seconds: float  # seconds after which `wait` has told of a dead rank

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        """Finds a place for every rank and binds the node's socket where they will look for it.

        Raises:
            ConfigError: there is no place for them.
        """

    async def launch(self, spec: WorkerSpec) -> None:
        """Starts a rank; an `init_method` it lacks is provided."""

    async def wait(self, rank: int) -> str:
        """Returns when a rank that was launched has ended, and says how."""

    def where(self, rank: int) -> str:
        """Where a rank that was launched runs."""

    def kill(self) -> None:
        """Ends all ranks by force."""

    def started(self) -> None:
        """All ranks have connected, or none will any more."""

    async def close(self) -> None:
        """Gives back what `open` took. No rank is left."""


class FanOutExecutor(Executor):
    """Runs `specs[r]` in the process of rank r, which `launcher` starts."""

    def __init__(self, specs: Sequence[WorkerSpec], launcher: Launcher) -> None:
        self._specs = specs
        self._launcher = launcher
        self._context: zmq.asyncio.Context | None = None  # from start to shutdown
        self._socket: zmq.asyncio.Socket
        self._reader: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Task[None]] = []  # one per rank
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._sending = asyncio.Lock()  # every rank gets all steps in one order
        self._next_number = wire.start_number(len(specs), Link.STEPS)
        self._ended: PdserveError | None = None  # why nothing can be asked any more
        self._serving = False

    # ---- start ----

    async def start(self) -> Sequence[bytes]:
        starting = self._starting()  # before the first rank is there: it answers when it likes
        try:
            await self._open()
            for spec in self._specs:
                await self._launcher.launch(spec)
                self._watchers.append(self._background(self._watch(spec.rank)))
            answers = await self._started(starting)
        except BaseException:
            starting.cancel()
            await self.shutdown(deadline=0.0)
            raise
        finally:
            self._launcher.started()
        self._serving = True
        return answers

    async def _open(self) -> None:
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._context = context
        wire.remove_high_water_mark(self._socket)
        await self._launcher.open(self._socket)
        self._reader = self._background(self._read())

    def _starting(self) -> asyncio.Future[list[bytes]]:
        """Of every rank: its sockets are connected, its worker is built."""
        ranks = range(len(self._specs))
        connected = (self._expect(wire.start_number(r, link)) for r in ranks for link in Link)
        return asyncio.gather(*connected)

    async def _started(self, starting: asyncio.Future[list[bytes]]) -> list[bytes]:
        seconds = 0.0
        while not (await asyncio.wait([starting], timeout=_START_LOG_INTERVAL))[0]:
            seconds += _START_LOG_INTERVAL
            logger.info("waiting for %s to start, %.0f s so far", self._missing(), seconds)
        return starting.result()[Link.OUT :: len(Link)]

    def _missing(self) -> str:
        """The ranks that are not built yet, each with what it is at."""
        return ", ".join(
            f"rank {spec.rank} ({self._launcher.where(spec.rank)}; "
            f"{_stage(spec.rank, self._waiting)})"
            for spec in self._specs
            if wire.start_number(spec.rank, Link.OUT) in self._waiting
        )

    # ---- serve ----

    async def step(self, message: bytes) -> bytes:
        return await self._request([(spec.rank, Link.STEPS) for spec in self._specs], message)

    async def call(self, rank: int, message: bytes) -> bytes:
        if not 0 <= rank < len(self._specs):
            raise NodeError(f"there is no rank {rank}")
        return await self._request([(rank, Link.CALLS)], message)

    async def _request(self, links: Sequence[tuple[int, Link]], message: bytes) -> bytes:
        number = self._next_number
        self._next_number += 1
        answer = self._expect(number)
        try:
            if not answer.done():
                async with self._sending:
                    for rank, link in links:
                        await self._send(rank, link, number, message)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _expect(self, number: int) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._ended is None:
            self._waiting[number] = future
        else:
            future.set_exception(self._ended)
        return future

    async def _send(self, rank: int, link: Link, number: int, body: bytes) -> None:
        frames = [wire.routing_id(rank, link), wire.NUMBER.pack(number), body]
        await self._socket.send_multipart(frames)

    async def _read(self) -> None:
        for count in itertools.count(1):
            _, header, body = await self._socket.recv_multipart()
            self._take(header, body)
            if count % MAX_BURST == 0:
                await asyncio.sleep(0)  # what is there already comes without a pause otherwise

    def _take(self, header: bytes, body: bytes) -> None:
        rank, kind, number = wire.HEADER.unpack(header)
        if kind == Kind.BROKEN:
            self._step_failed(decode_failure(body))
        elif kind == Kind.LOG:
            write_log(body.decode(errors="replace"))
        elif kind != Kind.EVENT:
            self._resolve(kind, number, body)
        elif self._event_callback is not None:
            self._event_callback(rank, body)

    def _step_failed(self, error: PdserveError) -> None:
        """A step failed on a rank. One that lost a peer may say so before the peer's death is
        seen, which would tell more: it has a moment to be seen first."""
        lost = isinstance(error, NodeError) and error.code == "RANK_LOST"
        grace = self._launcher.death_notice_seconds if lost else 0.0
        asyncio.get_running_loop().call_later(grace, self._end, error)

    def _resolve(self, kind: int, number: int, body: bytes) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return  # its caller was cancelled
        if kind == Kind.FAILURE:
            future.set_exception(decode_failure(body))
        else:
            future.set_result(body)

    # ---- death ----

    async def _watch(self, rank: int) -> None:
        how = await self._launcher.wait(rank)
        if self._ended is not None:
            return  # it was told to stop, or followed another
        self._rank_died(rank, f"rank {rank} ({self._launcher.where(rank)}) {how}")

    def _rank_died(self, rank: int, reason: str) -> None:
        """The ranks are of no use without this one."""
        self._end(NodeError(reason, code="RANK_DIED"))
        self._launcher.kill()
        if self._serving:
            logger.error("%s; the node's other ranks are ended", reason)
            if self._death_callback is not None:
                self._death_callback(rank, reason)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """A reader that dies unnoticed would let everybody wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a defect", exc_info=error)
            self._rank_died(0, f"the ranks are not heard any more: {error!r}")

    def _end(self, error: PdserveError) -> None:
        """From now on `error` answers everything. The first cause wins."""
        self._ended = self._ended or error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    # ---- stop ----

    async def shutdown(self, deadline: float) -> None:
        self._end(NodeError("the node's ranks are stopped", code="STOPPED"))
        if self._context is None:
            return
        context, self._context = self._context, None
        if self._serving:
            await _within(deadline, self._stop_ranks(deadline))
        self._launcher.kill()
        if not await _within(_KILL_TIMEOUT, self._all_ended()):
            logger.error("ranks have not ended %.0f s after they were killed", _KILL_TIMEOUT)
        if self._reader is not None:
            self._reader.cancel()
        if not await _within(_KILL_TIMEOUT, _end(context, self._socket)):
            logger.error("ZeroMQ has not ended after %.0f s; its threads are left", _KILL_TIMEOUT)
        if not await _within(_KILL_TIMEOUT, self._launcher.close()):
            logger.error("the ranks' places were not given back within %.0f s", _KILL_TIMEOUT)

    async def _stop_ranks(self, deadline: float) -> None:
        await self._send_stop(deadline)
        await self._all_ended()

    async def _all_ended(self) -> None:
        if self._watchers:
            await asyncio.wait(self._watchers)

    async def _send_stop(self, deadline: float) -> None:
        body = msgspec.msgpack.encode(float(deadline))
        for spec in self._specs:
            for link in (Link.STEPS, Link.CALLS):
                await self._send(spec.rank, link, wire.STOP, body)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` was done within `seconds`; it is given up otherwise."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def _end(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
    """Closes the socket and waits until libzmq's threads have ended. A thread waits, which nobody
    joins, so that whoever is tired of waiting can go on: they wait for ever if a wake-up is lost,
    as one is whose descriptor (an eventfd of libzmq's) somebody else closed and then was given."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with suppress(RuntimeError):  # the loop is closed: nobody waited any more
            loop.call_soon_threadsafe(ended.set)

    socket.close(linger=0)
    threading.Thread(target=terminate, name="zmq-end", daemon=True).start()
    await ended.wait()


def _stage(rank: int, waiting: Container[int]) -> str:
    """What a rank that starts is at."""
    silent = [link for link in Link if wire.start_number(rank, link) in waiting]
    return "builds its worker" if silent == [Link.OUT] else "connects"
