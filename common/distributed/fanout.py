"""The ZeroMQ fan-out: steps, calls and events between a node and ranks in other processes, local or
remote. `wire.py` defines the frames.

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
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.waits import saying
from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import Executor, WorkerSpec
from pdserve.common.distributed.wire import Link, RankMessage, decode_failure
from pdserve.common.obs.logging import write_log

logger = logging.getLogger(__name__)

_KILL_TIMEOUT = 5.0  # seconds for each part of a stop after ranks are killed
MAX_BURST = 32  # messages from ranks handled before the event loop gets control


class Launcher(Protocol):
    """Starts ranks and watches for their end."""

    death_notice_seconds: float  # seconds within which `wait` notices a dead rank

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        """Allocates resources for all ranks and binds the node's socket.

        Raises:
            ConfigError: there are not enough resources.
        """

    async def launch(self, spec: WorkerSpec) -> None:
        """Starts a rank; fills in its `init_method` if empty."""

    async def wait(self, rank: int) -> str:
        """Waits for the end of a launched rank; returns a description of how it ended."""

    def where(self, rank: int) -> str:
        """Returns where a launched rank runs."""

    def kill(self) -> None:
        """Kills all ranks."""

    def started(self) -> None:
        """Called when all ranks have connected, or the start has failed."""

    async def close(self) -> None:
        """Releases the resources of `open`. No rank is left."""


class FanOutExecutor(Executor):
    """Runs `specs[r]` in the process of rank r, which `launcher` starts."""

    def __init__(self, specs: Sequence[WorkerSpec], launcher: Launcher) -> None:
        self._specs = specs
        self._launcher = launcher
        self._context: zmq.asyncio.Context | None = None  # set from start to shutdown
        self._socket: zmq.asyncio.Socket
        self._reader: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Task[None]] = []  # one per rank
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._sending = asyncio.Lock()  # all ranks get the steps in the same order
        self._next_number = wire.start_number(len(specs), Link.STEPS)
        self._ended: PdserveError | None = None  # the error of all further requests
        self._serving = False

    # ---- start ----

    async def start(self) -> Sequence[bytes]:
        starting = self._starting()  # before launching, because answers may come at any time
        try:
            await self._open()
            for spec in self._specs:
                await self._launcher.launch(replace(spec, version=wire.code_version()))
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
        """Returns a future of all ranks' start answers: sockets connected, worker built."""
        ranks = range(len(self._specs))
        connected = (self._expect(wire.start_number(r, link)) for r in ranks for link in Link)
        return asyncio.gather(*connected)

    async def _started(self, starting: asyncio.Future[list[bytes]]) -> list[bytes]:
        with saying(lambda: f"waiting for {self._missing()} to start"):
            return (await starting)[Link.OUT :: len(Link)]

    def _missing(self) -> str:
        """Describes the ranks that are not ready yet."""
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
            raise NodeError(f"rank {rank} does not exist")
        return await self._request([(rank, Link.CALLS)], message)

    async def ping(self, rank: int) -> None:
        await self.call(rank, wire.PING)

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
                await asyncio.sleep(0)  # recv of a queued message does not yield to the loop

    def _take(self, header: bytes, body: bytes) -> None:
        rank, kind, number = wire.HEADER.unpack(header)
        if kind == RankMessage.BROKEN:
            self._step_failed(decode_failure(body))
        elif kind == RankMessage.LOG:
            write_log(body.decode(errors="replace"))
        elif kind != RankMessage.EVENT:
            self._resolve(kind, number, body)
        elif self._event_callback is not None:
            self._event_callback(rank, body)

    def _step_failed(self, error: PdserveError) -> None:
        """Ends the executor after a failed step. If the rank lost a peer, it waits a moment for the
        notice of the peer's death, which is the better error."""
        lost = isinstance(error, NodeError) and error.code == "RANK_LOST"
        grace = self._launcher.death_notice_seconds if lost else 0.0
        asyncio.get_running_loop().call_later(grace, self._end, error)

    def _resolve(self, kind: int, number: int, body: bytes) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return  # its caller was cancelled
        if kind == RankMessage.FAILURE:
            future.set_exception(decode_failure(body))
        else:
            future.set_result(body)

    # ---- death ----

    async def _watch(self, rank: int) -> None:
        how = await self._launcher.wait(rank)
        if self._ended is not None:
            return  # stopped on purpose, or killed after another rank's death
        self._rank_died(rank, f"rank {rank} ({self._launcher.where(rank)}) {how}")

    def _rank_died(self, rank: int, reason: str) -> None:
        """Kills the other ranks and reports the death."""
        self._end(NodeError(reason, code="RANK_DIED"))
        self._launcher.kill()
        if self._serving:
            logger.error("%s; killing the node's other ranks", reason)
            if self._death_callback is not None:
                self._death_callback(rank, reason)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """Reports an exception of a background task, or requests would never end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("messages of the ranks cannot be read", exc_info=error)
            self._rank_died(0, f"messages of the ranks cannot be read: {error!r}")

    def _end(self, error: PdserveError) -> None:
        """Fails all waiting and further requests with `error`; the first cause wins."""
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
            logger.error("ranks are still running %.0f s after they were killed", _KILL_TIMEOUT)
        if self._reader is not None:
            self._reader.cancel()
        if not await _within(_KILL_TIMEOUT, _end(context, self._socket)):
            logger.error("ZeroMQ did not stop within %.0f s; its threads remain", _KILL_TIMEOUT)
        if not await _within(_KILL_TIMEOUT, self._launcher.close()):
            logger.error("the ranks' resources were not freed within %.0f s", _KILL_TIMEOUT)

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
    """Returns whether `work` finished within `seconds`; cancels it otherwise."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def _end(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
    """Closes the socket and waits until libzmq's threads have ended. The blocking wait is on a
    daemon thread, so that the caller can time out: libzmq never returns if a wake-up is lost, for
    example when other code has closed libzmq's eventfd and reused its number."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with suppress(RuntimeError):  # the loop is closed, so the caller has timed out
            loop.call_soon_threadsafe(ended.set)

    socket.close(linger=0)
    threading.Thread(target=terminate, name="zmq-end", daemon=True).start()
    await ended.wait()


def _stage(rank: int, waiting: Container[int]) -> str:
    """Describes what a starting rank is doing."""
    silent = [link for link in Link if wire.start_number(rank, link) in waiting]
    return "builds its worker" if silent == [Link.OUT] else "connects"
