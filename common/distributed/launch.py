"""Chooses how a node's ranks run."""

from __future__ import annotations

from collections.abc import Sequence

from common.distributed.executor import Executor, WorkerSpec
from common.distributed.inprocess import InProcessExecutor
from common.distributed.multiprocess import MultiprocessExecutor


def make_executor(specs: Sequence[WorkerSpec]) -> Executor:
    """An executor, not yet started, for `specs[r]` = rank r: the single rank of a node runs in this
    process, several run in one process each, also those of replicas: threads of one process would
    share its interpreter lock."""
    if len(specs) == 1 and specs[0].local_world_size == 1:
        return InProcessExecutor(specs[0])
    return MultiprocessExecutor(specs)
