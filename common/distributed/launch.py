"""Starts a node's ranks: in this process, as child processes, or as Ray actors."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import zmq.asyncio

from pdserve.common.config.engine import ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import helper_environment
from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import Executor, InProcessExecutor, WorkerSpec
from pdserve.common.distributed.fanout import FanOutExecutor, Launcher

logger = logging.getLogger(__name__)


def make_executor(
    specs: Sequence[WorkerSpec],
    parallel: ParallelConfig | None = None,
    device: str = "cpu",
) -> Executor:
    """Returns an executor, not started, with `specs[r]` as rank r on a "cpu" or "cuda" `device`.
    The ranks of several replicas also get their own processes, because threads would share the GIL.

    Raises:
        ConfigError: Ray was requested but is not available.
    """
    parallel = parallel or ParallelConfig()
    ranks = max(len(specs), specs[0].local_world_size)  # of the node
    room = ranks if device == "cpu" else torch.cuda.device_count()
    backend = choose_backend(
        parallel.distributed_executor_backend,
        ranks,
        room,
        lambda: _ray_answers(parallel.ray_address),
    )
    match backend:
        case "ray":
            return _ray_executor(specs, parallel, device)
        case "mp":
            return MultiprocessExecutor(specs)
        case _:
            return InProcessExecutor(specs[0])


def choose_backend(requested: str, ranks: int, room: int, ray_answers: Callable[[], bool]) -> str:
    """Resolves `--distributed-executor-backend` to "ray", "mp" or "" (in this process). `room`: how
    many ranks this host has devices for."""
    if requested != "auto":
        return requested
    if ranks > room and ray_answers():
        return "ray"
    return "mp" if ranks > 1 else ""


def _ray_answers(address: str | None) -> bool:
    try:
        _connect_to_ray(address)
    except ConfigError as error:
        logger.info("the ranks do not fit on this host, and Ray cannot be used: %s", error)
        return False
    return True


def _ray_executor(specs: Sequence[WorkerSpec], parallel: ParallelConfig, device: str) -> Executor:
    _connect_to_ray(parallel.ray_address)
    from pdserve.common.distributed.ray_executor import RayExecutor

    timeout = parallel.distributed_timeout
    return RayExecutor(specs, parallel.tensor_parallel_size, device, timeout)


def _connect_to_ray(address: str | None) -> None:
    """Connects to Ray, which is imported only here because that takes a second."""
    try:
        from pdserve.common.distributed.ray_executor import connect
    except ModuleNotFoundError as error:
        raise ConfigError(f"Ray is not installed ({error}): pip install 'pdserve[ray]'") from error
    connect(address)


class MultiprocessExecutor(FanOutExecutor):
    """Runs `specs[r]` in the process of rank r on this host."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        super().__init__(specs, LocalProcesses())


class LocalProcesses(Launcher):
    """Runs ranks as child processes, whose end is noticed at once."""

    death_notice_seconds = 0.5

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
            shutil.rmtree(self._directory)  # sockets and files are open; the names can go

    async def close(self) -> None:
        """Waits until the pipes of the processes, which have ended, are closed, too: the event loop
        may end then."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
                with suppress(OSError):
                    await process.stdin.wait_closed()

    async def wait(self, rank: int) -> str:
        return _describe_exit(await self._processes[rank].wait())

    def where(self, rank: int) -> str:
        return f"pid {self._processes[rank].pid}"

    def kill(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()


async def spawn(directory: Path, rank: int) -> Process:
    rank_main = (sys.executable, "-P", "-m", "pdserve.common.distributed.rank_main")
    return await asyncio.create_subprocess_exec(
        *(*rank_main, str(directory), str(rank)),
        stdin=PIPE,  # EOF tells the rank that this process is gone
        stdout=2,  # a rank's prints go to standard error
        env=helper_environment({"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}),
        start_new_session=True,  # Ctrl-C in a terminal reaches only the node
    )


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name}"
