"""Executors run a node's ranks, in this process or one process each, behind one interface.

    InProcessExecutor      one rank, on a thread of its own
    MultiprocessExecutor   one process per rank, on this host     ⎫ the same ZeroMQ fan-out
    RayExecutor            one Ray actor per rank, on any host    ⎭ (`fanout.py`)
    make_executor          chooses one (`launch.py`)

A rank hosts a worker (an object built from an import string) and the worker's extension, which has
its own channel and thread, so that it is served while a step computes.
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
        """Returns the bytes for `RankReady.extension_info`."""

    def handle(self, message: bytes) -> bytes:
        """Serves one call from the node. Must return fast and may be called while a step runs."""

    def handle_at_once(self, message: bytes) -> bytes | None:
        """Like `handle`, but on the event loop, for an extension in the node's own process. Returns
        None if the call may take longer than switching to a thread, or while `handle` is running;
        then `handle` must serve it."""

    def close(self, deadline: float) -> None:
        """Stops all I/O within `deadline` seconds."""


class Worker(Protocol):
    """One rank, built in its own process or thread by `WorkerSpec.factory(spec, emit)`. The
    executor closes the extension first and then the worker."""

    @property
    def extension(self) -> Extension | None: ...

    def ready(self) -> bytes:
        """Returns a msgpack `RankReady`; called once."""

    def step(self, message: bytes) -> bytes | Callable[[], bytes]:
        """Runs one step: msgpack `StepDelta` in, msgpack `StepOutput` out (that of the
        `output_rank` is used). Instead of the output it may return a callable that waits for it,
        which the executor calls on another thread: the next step begins meanwhile."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a rank's process needs to build its worker. Sent as msgpack, never
    pickled."""

    factory: str  # "module:callable"
    rank: int
    world_size: int
    init_method: str  # where ranks connect; "": the executor provides it
    # Plain data that the factory decodes (the engine config as builtins); may contain secrets.
    config: Any = field(repr=False)
    output_rank: int = 0  # whose answers to steps are used
    local_rank: int = 0  # its place among the node's ranks of its host: the GPU it computes on
    local_world_size: int = 1  # those ranks, of all replicas: they share the host's cores and RAM
    role: str = "node"  # whose rank this is, for the log
    version: str = ""  # of the node's code: `wire.code_version`
    log: LogConfig = field(default_factory=LogConfig)  # of a rank with a process of its own


class Executor(ABC):
    """Runs steps on all ranks, and passes messages to and from their extensions."""

    _event_callback: Callable[[int, bytes], None] | None = None
    _death_callback: Callable[[int, str], None] | None = None

    def on_event(self, callback: Callable[[int, bytes], None]) -> None:
        """Sets the callback for events of extensions: (rank, event), on the event loop."""
        self._event_callback = callback

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        """Sets the callback for the death of a rank: (rank, reason), on the event loop."""
        self._death_callback = callback

    @abstractmethod
    async def start(self) -> Sequence[bytes]:
        """Builds all ranks; returns each rank's `ready()`.

        Raises:
            ConfigError: a rank cannot start as configured.
            NodeError: a rank failed to start; the message has its error.
        """

    @abstractmethod
    async def ping(self, rank: int) -> None:
        """Returns when the process of the rank answers, whatever it computes; at once if it is this
        process.

        Raises:
            NodeError: a rank has died.
        """

    @abstractmethod
    async def step(self, message: bytes) -> bytes:
        """Runs one step on all ranks and returns the answer of their `output_rank`. Several may
        be in flight: every rank runs them in the order of the calls, and a pipeline's stages
        work on different ones at once.

        Raises:
            NodeError: a rank raised or died; the ranks are out of step, so the node must end.
        """

    @abstractmethod
    async def call(self, rank: int, message: bytes) -> bytes:
        """Calls one rank's extension, also while a step runs.

        Raises:
            PdserveError: the extension's error (NodeError if it was not typed), or the rank is
                dead.
        """

    @abstractmethod
    async def shutdown(self, deadline: float) -> None:
        """Stops all ranks and kills them after `deadline` seconds; no process is left afterwards.
        May be called at any time and more than once."""


class InProcessExecutor(Executor):
    """Runs one rank on two threads of this process: for steps, and for calls to its extension that
    the event loop does not serve itself.

    torch releases the GIL while it computes, so the event loop stays responsive. Messages are the
    same bytes as between processes. The rank cannot die alone; `on_death` is called only if an
    event callback raises.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="rank-0-steps")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="rank-0-answers")
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="rank-0-calls")

    async def start(self) -> Sequence[bytes]:
        loop = asyncio.get_running_loop()

        def emit(event: bytes) -> None:
            loop.call_soon_threadsafe(self._deliver, event)

        def build() -> tuple[Worker, bytes]:
            worker: Worker = import_string(self._spec.factory)(self._spec, emit)
            return worker, worker.ready()

        await self._run(self._calls, lambda: None)  # start the thread while there is memory for it
        self._worker, ready = await self._run(self._steps, build)
        return [ready]

    async def step(self, message: bytes) -> bytes:
        worker = self._running()
        answer = await self._run(self._steps, lambda: worker.step(message))
        return answer if isinstance(answer, bytes) else await self._run(self._answers, answer)

    async def call(self, rank: int, message: bytes) -> bytes:
        extension = self._running().extension
        if rank != 0 or extension is None:
            raise NodeError(f"rank {rank} has no extension")
        try:
            answer = extension.handle_at_once(message)
        except Exception as error:
            raise to_pdserve_error(error, rank=0) from error
        if answer is not None:
            return answer
        return await self._run(self._calls, lambda: extension.handle(message))

    async def ping(self, rank: int) -> None:
        self._running()

    async def shutdown(self, deadline: float) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                async with asyncio.timeout(deadline):
                    await self._close(worker, deadline)
            except TimeoutError:
                logger.warning("rank 0 is still computing after %.1f s", deadline)
        self._steps.shutdown(wait=False)
        self._answers.shutdown(wait=False)
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
        except Exception as error:  # otherwise the event loop would log it and continue
            logger.exception("an event of rank 0 could not be handled")
            if self._death_callback is not None:
                self._death_callback(0, f"an event of the rank could not be handled: {error!r}")
