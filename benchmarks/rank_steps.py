"""Runs steps of a benchmark's own worker on ranks of this host."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.config.shared import LogConfig
from pdserve.common.distributed.check import CheckConfig
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.distributed.launch import make_executor


async def step_all(
    factory: str, ranks: int, config: CheckConfig, messages: Sequence[bytes]
) -> list[bytes]:
    """Starts the ranks, sends the messages one after another and returns the first rank's answers.
    `factory`: `module:Class` of a `CheckWorker`."""
    plain, log = msgspec.to_builtins(config), LogConfig(log_level="warning")
    executor = make_executor(
        [
            WorkerSpec(factory, rank, ranks, "", plain, role="bench", log=log)
            for rank in range(ranks)
        ]
    )
    try:
        await executor.start()
        return [await executor.step(message) for message in messages]
    finally:
        await executor.shutdown(5.0)
