"""How a node's ranks run: in this process, or one process each. The caller cannot tell.

    InProcessExecutor      one rank, on a thread of its own
    MultiprocessExecutor   one process per rank, on this host     ⎫ the same ZeroMQ fan-out
    RayExecutor            one Ray actor per rank, on any host    ⎭ (`fanout.py`)
    make_executor          the one that fits (`launch.py`)

A rank hosts a worker (an object built from an import string) and, beside it, the worker's
extension, which has a channel and a thread of its own, so that it is served while a step
computes.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import NodeError
from pdserve.common.core.plugins import import_string
from pdserve.common.distributed.wire import to_pdserve_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

Emit = Callable[[bytes], None]


class Extension(Protocol):
    """Lives beside a worker and shares its memory; speaks bytes. For pdserve this is the rank
    half of the KV transfer, `WorkerConnector`; this layer does not know that."""

    def info(self) -> bytes:
        """What the rank announces for it in `RankReady.extension_info`."""

    def handle(self, message: bytes) -> bytes:
        """Serves one call from the node. Must return fast and may be called while a step runs."""

    def handle_at_once(self, message: bytes) -> bytes | None:
        """As `handle`, for an extension in the node's own process, on its event loop; None: it may
        take longer than waking a thread would, and `handle` is to serve it. One call is served at
        a time: while `handle` is at work, this returns None."""

    def close(self, deadline: float) -> None:
        """Stops all I/O within `deadline` seconds."""


class Worker(Protocol):
    """One rank. Built in its own process (or thread) by `WorkerSpec.factory(spec, emit)`; its
    host closes the extension first and then the worker."""

    @property
    def extension(self) -> Extension | None: ...

    def ready(self) -> bytes:
        """What the rank reports once (a msgpack `RankReady`)."""

    def step(self, message: bytes) -> bytes:
        """Runs one step: msgpack `StepDelta` in, msgpack `StepOutput` out (that of the
        `output_rank` is used)."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All a rank's process needs to build its worker. Encoded as msgpack, never pickled."""

    factory: str  # "module:callable"
    rank: int
    world_size: int
    init_method: str  # where ranks find each other; "": the executor provides a place
    # Plain data the factory decodes (the engine config as builtins); it may hold secrets.
    config: Any = field(repr=False)
    output_rank: int = 0  # whose answers to steps are used
    local_rank: int = 0  # its place among the node's ranks of its host: the GPU it computes on
    local_world_size: int = 1  # those ranks, of all replicas: they share the host's cores and RAM
    role: str = "node"  # whose rank this is, for the log
    log: LogConfig = field(default_factory=LogConfig)  # of a rank with a process of its own


class Executor(ABC):
    """Runs steps on all ranks and carries messages to and from their extensions."""

    _event_callback: Callable[[int, bytes], None] | None = None
    _death_callback: Callable[[int, str], None] | None = None

    def on_event(self, callback: Callable[[int, bytes], None]) -> None:
        """Sets who is called with (rank, event) of extensions, on the event loop."""
        self._event_callback = callback

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        """Sets who is called once a rank has died (rank, reason), on the event loop."""
        self._death_callback = callback

    @abstractmethod
    async def start(self) -> Sequence[bytes]:
        """Builds all ranks; returns each rank's `ready()`.

        Raises:
            ConfigError: a rank cannot start as configured.
            NodeError: a rank failed to start; the message holds its last words.
        """

    @abstractmethod
    async def step(self, message: bytes) -> bytes:
        """Runs one step on all ranks and returns the answer of their `output_rank`. Several may
        be in flight: every rank runs them in the order of the calls, and a pipeline's stages
        work on different ones at once.

        Raises:
            NodeError: a rank raised or died; the ranks no longer agree, so the node must end.
        """

    @abstractmethod
    async def call(self, rank: int, message: bytes) -> bytes:
        """Calls one rank's extension; served even while a step runs.

        Raises:
            PdserveError: what the extension raised (NodeError if it was not typed), or the
                rank is dead.
        """

    @abstractmethod
    async def shutdown(self, deadline: float) -> None:
        """Stops all ranks, by force after `deadline` seconds; afterwards no process of this
        executor is left. May be called at any time and more than once."""


class InProcessExecutor(Executor):
    """One rank on threads of this process: one for its steps, one for its extension's calls, those
    that are not served at once.

    torch releases the GIL while it computes, so the event loop stays responsive. Messages are the
    same bytes as between processes. The rank cannot die alone; `on_death` tells only of an event
    whose callback failed.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="rank-0-steps")
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="rank-0-calls")

    async def start(self) -> Sequence[bytes]:
        loop = asyncio.get_running_loop()

        def emit(event: bytes) -> None:
            loop.call_soon_threadsafe(self._deliver, event)

        def build() -> tuple[Worker, bytes]:
            worker: Worker = import_string(self._spec.factory)(self._spec, emit)
            return worker, worker.ready()

        await self._run(self._calls, lambda: None)  # later there may be no room for a thread
        self._worker, ready = await self._run(self._steps, build)
        return [ready]

    async def step(self, message: bytes) -> bytes:
        worker = self._running()
        return await self._run(self._steps, lambda: worker.step(message))

    async def call(self, rank: int, message: bytes) -> bytes:
        extension = self._running().extension
        if rank != 0 or extension is None:
            raise NodeError(f"there is no extension on rank {rank}")
        try:
            answer = extension.handle_at_once(message)
        except Exception as error:
            raise to_pdserve_error(error, rank=0) from error
        if answer is not None:
            return answer
        return await self._run(self._calls, lambda: extension.handle(message))

    async def shutdown(self, deadline: float) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                async with asyncio.timeout(deadline):
                    await self._close(worker, deadline)
            except TimeoutError:
                logger.warning("rank 0 still computes after %.1f s", deadline)
        self._steps.shutdown(wait=False)
        self._calls.shutdown(wait=False)

    async def _close(self, worker: Worker, deadline: float) -> None:
        extension = worker.extension
        if extension is not None:
            await self._run(self._calls, lambda: extension.close(deadline))
        await self._run(self._steps, worker.close)

    def _running(self) -> Worker:
        if self._worker is None:
            raise NodeError("rank 0 is not running")
        return self._worker

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except Exception as error:
            raise to_pdserve_error(error, rank=0) from error

    def _deliver(self, event: bytes) -> None:
        if self._event_callback is None:
            return
        try:
            self._event_callback(0, event)
        except Exception as error:  # a defect; the loop would log it and go on
            logger.exception("a defect")
            if self._death_callback is not None:
                self._death_callback(0, f"the rank is not heard any more: {error!r}")
