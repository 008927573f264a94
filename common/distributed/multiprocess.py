"""One process per rank: start, ZeroMQ fan-out, liveness, stop. See `wire.py` for the frames.

start ─ spawn all ─ each rank connects and builds ─▶ serving ─ shutdown ─▶ stopped
             │                                          │
             └── a rank fails or dies: kill all, raise ─┴─▶ fail what waits, kill all, on_death
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from common.core.errors import NodeError, PdserveError
from common.distributed import wire
from common.distributed.executor import Executor, WorkerSpec
from common.distributed.failure import decode_failure
from common.distributed.wire import Kind, Link

logger = logging.getLogger(__name__)

_DEATH_IS_SEEN = 0.5  # seconds after which the system has told of a dead process
_PATIENCE = 15.0  # seconds between two lines about ranks that are still starting


class MultiprocessExecutor(Executor):
    """Runs `specs[r]` in the process of rank r."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = specs
        self._processes: list[Process] = []
        self._tasks: list[asyncio.Task[None]] = []  # the reader, then one watcher per rank
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._sending = asyncio.Lock()  # every rank gets all steps in one order
        self._next_number = wire.start_number(len(specs), Link.STEPS)
        self._ended: PdserveError | None = None  # why nothing can be asked any more
        self._serving = False
        self._hear: Callable[[int, bytes], None] | None = None
        self._mourn: Callable[[int, str], None] | None = None

    # ---- start ----

    async def start(self) -> Sequence[bytes]:
        directory = Path(tempfile.mkdtemp(prefix="pdserve-"))
        starting = self._starting()  # before the first rank is there: it answers when it likes
        try:
            self._listen(directory)
            for spec in self._specs:
                await self._spawn(spec, directory)
            answers = await self._started(starting)
        except BaseException:
            starting.cancel()
            await self.shutdown(deadline=0.0)
            raise
        finally:
            shutil.rmtree(directory)  # everyone has connected: the names have served
        self._serving = True
        return answers

    def _listen(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        wire.unbounded(self._socket)
        self._socket.bind(wire.node_address(directory))
        self._background(self._read())

    async def _spawn(self, spec: WorkerSpec, directory: Path) -> None:
        if not spec.init_method:
            spec = replace(spec, init_method=f"file://{directory}/rendezvous")
        wire.spec_path(directory, spec.rank).write_bytes(msgspec.msgpack.encode(spec))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "common.distributed.rank_main"),
            *(str(directory), str(spec.rank)),
            stdin=PIPE,  # its end tells the rank that this process is gone
            stdout=2,  # whatever a rank prints goes to standard error
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            start_new_session=True,  # a terminal's Ctrl-C is for the node alone
        )
        self._processes.append(process)
        self._background(self._watch(spec.rank, process))

    def _starting(self) -> asyncio.Future[list[bytes]]:
        """Of every rank: its sockets are connected, its worker is built."""
        ranks = range(len(self._specs))
        connected = (self._expect(wire.start_number(r, link)) for r in ranks for link in Link)
        return asyncio.gather(*connected)

    async def _started(self, starting: asyncio.Future[list[bytes]]) -> list[bytes]:
        seconds = 0.0
        while not (await asyncio.wait([starting], timeout=_PATIENCE))[0]:
            seconds += _PATIENCE
            logger.info("waiting for %s to start, %.0f s so far", self._missing(), seconds)
        return starting.result()[Link.OUT :: len(Link)]

    def _missing(self) -> str:
        """The ranks that are not built yet, each with what it is at."""
        return ", ".join(
            f"rank {spec.rank} (pid {process.pid}; {_stage(spec.rank, self._waiting)})"
            for spec, process in zip(self._specs, self._processes, strict=True)
            if wire.start_number(spec.rank, Link.OUT) in self._waiting
        )

    # ---- serve ----

    async def step(self, message: bytes) -> bytes:
        return await self._ask([(spec.rank, Link.STEPS) for spec in self._specs], message)

    async def call(self, rank: int, message: bytes) -> bytes:
        if not 0 <= rank < len(self._specs):
            raise NodeError(f"there is no rank {rank}")
        return await self._ask([(rank, Link.CALLS)], message)

    async def _ask(self, links: Sequence[tuple[int, Link]], message: bytes) -> bytes:
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
        while True:
            _, header, body = await self._socket.recv_multipart()
            rank, kind, number = wire.HEADER.unpack(header)
            if kind == Kind.BROKEN:
                self._broken(decode_failure(body))
            elif kind != Kind.EVENT:
                self._settle(kind, number, body)
            elif self._hear is not None:
                self._hear(rank, body)

    def _broken(self, error: PdserveError) -> None:
        """A step failed on a rank. One that lost a peer may say so before the peer's death is
        seen, which would tell more: it has a moment to be seen first."""
        grace = _DEATH_IS_SEEN if isinstance(error, NodeError) and error.code == "RANK_LOST" else 0
        asyncio.get_running_loop().call_later(grace, self._end, error)

    def _settle(self, kind: int, number: int, body: bytes) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return  # its caller was cancelled
        if kind == Kind.FAILURE:
            future.set_exception(decode_failure(body))
        else:
            future.set_result(body)

    def on_event(self, callback: Callable[[int, bytes], None]) -> None:
        self._hear = callback

    # ---- death ----

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        self._mourn = callback

    async def _watch(self, rank: int, process: Process) -> None:
        status = await process.wait()
        if self._ended is not None:
            return  # it was told to stop, or followed another
        self._lose(rank, f"rank {rank} (pid {process.pid}) {_describe_exit(status)}")

    def _lose(self, rank: int, reason: str) -> None:
        """The ranks are of no use without this one."""
        self._end(NodeError(reason, code="RANK_DIED"))
        self._kill()
        if self._serving:
            logger.error("%s; the node's other ranks are ended", reason)
            if self._mourn is not None:
                self._mourn(rank, reason)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._background_ended)
        self._tasks.append(task)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """A reader that dies unnoticed would let everybody wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a defect", exc_info=error)
            self._lose(0, f"the ranks are not heard any more: {error!r}")

    def _end(self, error: PdserveError) -> None:
        """From now on `error` answers everything. The first cause wins."""
        self._ended = self._ended or error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()

    # ---- stop ----

    async def shutdown(self, deadline: float) -> None:
        self._end(NodeError("the node's ranks are stopped", code="STOPPED"))
        if not self._tasks:
            return
        reader, *watchers = self._tasks
        if self._serving:
            await self._tell_stop(deadline)
            await asyncio.wait(watchers, timeout=deadline)
        self._kill()
        await asyncio.gather(*watchers)
        reader.cancel()
        await asyncio.wait([reader])
        self._context.destroy(linger=0)
        self._processes, self._tasks, self._serving = [], [], False

    async def _tell_stop(self, deadline: float) -> None:
        body = msgspec.msgpack.encode(float(deadline))
        for spec in self._specs:
            for link in (Link.STEPS, Link.CALLS):
                await self._send(spec.rank, link, wire.STOP, body)


def _stage(rank: int, waiting: Container[int]) -> str:
    """What a rank that starts is at."""
    silent = [link for link in Link if wire.start_number(rank, link) in waiting]
    return "builds its worker" if silent == [Link.OUT] else "connects"


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name}"
