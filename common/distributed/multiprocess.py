"""One process per rank on this host: start, liveness, end. `fanout.py` talks to them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq.asyncio

from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.distributed.fanout import FanOutExecutor, Launcher


class MultiprocessExecutor(FanOutExecutor):
    """Runs `specs[r]` in the process of rank r on this host."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        super().__init__(specs, LocalProcesses())


class LocalProcesses(Launcher):
    """Child processes. The system tells at once when one of them ends."""

    death_is_seen = 0.5

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}  # by rank
        self._directory: Path | None = None  # until all ranks have connected

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pdserve-"))
        socket.bind(wire.local_address(self._directory).url)

    async def launch(self, spec: WorkerSpec) -> None:
        directory = self._directory
        assert directory is not None, "open comes first"
        if not spec.init_method:
            spec = replace(spec, init_method=f"file://{directory}/rendezvous")
        wire.spec_path(directory, spec.rank).write_bytes(msgspec.msgpack.encode(spec))
        self._processes[spec.rank] = await spawn(directory, spec.rank)

    def started(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory)  # the names have served

    async def close(self) -> None:
        """There is nothing but the processes."""

    async def wait(self, rank: int) -> str:
        return _describe_exit(await self._processes[rank].wait())

    def where(self, rank: int) -> str:
        return f"pid {self._processes[rank].pid}"

    def kill(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()


async def spawn(directory: Path, rank: int) -> Process:
    return await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "pdserve.common.distributed.rank_main",
            str(directory),
            str(rank),
        ),
        stdin=PIPE,  # its end tells the rank that this process is gone
        stdout=2,  # whatever a rank prints goes to standard error
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        start_new_session=True,  # a terminal's Ctrl-C is for the node alone
    )


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name}"
