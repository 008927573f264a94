"""Background work of the control halves, none of it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from pdserve.common.core.errors import Blame, PdserveError, TransferError

logger = logging.getLogger(__name__)


class Tasks:
    """Tasks somebody must hold on to; a failure is logged, `join` waits for all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PdserveError):
            logger.warning("KV transfer, in the background: %s", error)
        else:
            logger.error("KV transfer, in the background: a defect", exc_info=error)

    async def join(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


def as_typed(error: Exception, here: Blame) -> PdserveError:
    """What ended a transfer's work on the node whose role is `here`. What nobody expected is that
    node's defect, and in its log."""
    if isinstance(error, PdserveError):
        return error
    logger.error("KV transfer: a defect", exc_info=error)
    message = f"the {here} node failed in the KV transfer: {type(error).__name__}"
    return TransferError(message, code="INTERNAL", blame=here, retryable=True)
