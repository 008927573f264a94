"""Simulates ranks on hosts without the model, inside the processes of a node and its ranks."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import PosixPath
from typing import Any

from pdserve.common.model import broadcast
from pdserve.common.worker import worker

NOWHERE = "/no/such/folder"


def later_ranks() -> None:
    """Gives all ranks but the first paths that do not exist."""
    build = worker.build_worker

    def elsewhere(spec: Any, emit: Any) -> Any:
        if spec.rank > 0:
            engine = spec.config["engine"]
            engine["model"]["model"] = NOWHERE
            if draft := engine["speculation"]["speculative_config"]:
                draft["model"] = NOWHERE
        return build(spec, emit)

    worker.build_worker = elsewhere


class FullDisk(PosixPath):
    def write_bytes(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk() -> None:
    """Makes the other ranks fail to write the small files that they receive."""
    later_ranks()
    broadcast.Path = FullDisk  # type: ignore[misc]


def dying_reader(count: str) -> None:
    """Kills the first rank after it has read `count` runs of rows."""
    later_ranks()
    rows = broadcast._rows

    def few(*given: Any) -> Iterator[Any]:
        for number, message in enumerate(rows(*given)):
            if number == int(count):
                os.kill(os.getpid(), signal.SIGKILL)
            yield message

    broadcast._rows = few  # type: ignore[assignment]
