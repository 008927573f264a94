"""One rank on threads of this process: one for its steps, one for its extension's calls.

torch releases the GIL while it computes, so the event loop stays responsive. Messages are the
same bytes as between processes, so both executors behave alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.common.core.errors import NodeError
from pdserve.common.core.plugins import import_string
from pdserve.common.distributed.executor import Executor, Worker, WorkerSpec
from pdserve.common.distributed.wire import typed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InProcessExecutor(Executor):
    """Runs the only rank of a node. It cannot die alone; `on_death` hears only of an event that
    nobody understood."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="rank-0-steps")
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="rank-0-calls")
        self._hear: Callable[[int, bytes], None] | None = None
        self._mourn: Callable[[int, str], None] | None = None

    async def start(self) -> Sequence[bytes]:
        loop = asyncio.get_running_loop()

        def emit(event: bytes) -> None:
            loop.call_soon_threadsafe(self._deliver, event)

        def build() -> tuple[Worker, bytes]:
            worker: Worker = import_string(self._spec.factory)(self._spec, emit)
            return worker, worker.ready()

        self._worker, ready = await self._run(self._steps, build)
        return [ready]

    async def step(self, message: bytes) -> bytes:
        worker = self._running()
        return await self._run(self._steps, lambda: worker.step(message))

    async def call(self, rank: int, message: bytes) -> bytes:
        extension = self._running().extension
        if rank != 0 or extension is None:
            raise NodeError(f"there is no extension on rank {rank}")
        return await self._run(self._calls, lambda: extension.handle(message))

    def on_event(self, callback: Callable[[int, bytes], None]) -> None:
        self._hear = callback

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        self._mourn = callback

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
            raise typed(error, rank=0) from error

    def _deliver(self, event: bytes) -> None:
        if self._hear is None:
            return
        try:
            self._hear(0, event)
        except Exception as error:  # a defect; the loop would log it and go on
            logger.exception("a defect")
            if self._mourn is not None:
                self._mourn(0, f"the rank is not heard any more: {error!r}")
