"""Runs a node's ranks on hosts of their own without Ray: the code inside the node's process and
inside the ranks' processes."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from benchmarks import hosts
from pdserve.common.distributed import launch, rank_main, wire
from pdserve.common.distributed.environment import Rendezvous
from pdserve.common.distributed.executor import WorkerSpec

ADDRESS = "address"  # file with the node's address


def over(address: str, timeout: str, slow: str, *pids: str) -> None:
    """Has this process's node, at `address`, run its ranks on the hosts of `pids`, an equal number
    of consecutive ranks on each. Like Ray actors, they talk to the node over the network and exit
    after `timeout` seconds without a message from it. Each step takes `slow` seconds longer."""
    hosts.slow_steps(slow)
    place = partial(_place, pids)
    launch.LocalProcesses = partial(Apart, address, float(timeout), place)  # type: ignore
    rank_main.main = partial(_main, place)


def _place(pids: tuple[str, ...], spec: WorkerSpec) -> str:
    return pids[spec.rank * len(pids) // spec.world_size]


class Apart(launch.LocalProcesses):
    """A launcher that learns how a rank ended only if it ran on the first host."""

    def __init__(self, address: str, timeout: float, place: Any) -> None:
        super().__init__()
        self._address, self._timeout, self._place = address, timeout, place
        self._hosts: dict[int, str] = {}  # by rank
        self._stopped = asyncio.Event()

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pdserve-"))
        self._meeting = await asyncio.to_thread(Rendezvous, self._address)
        node = wire.listen(socket, self._address, self._timeout)
        (self._directory / ADDRESS).write_bytes(msgspec.msgpack.encode(node))

    async def launch(self, spec: WorkerSpec) -> None:
        self._hosts[spec.rank] = self._place(spec)
        await super().launch(replace(spec, init_method=self._meeting.init_method))

    async def wait(self, rank: int) -> str:
        if self._hosts[rank] == self._hosts[0]:
            return await super().wait(rank)
        ended = asyncio.create_task(super().wait(rank))
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and ended.result() != "exited with code 1":
            return ended.result()
        await stopped
        return "is not heard of"

    def kill(self) -> None:
        """Kills the ranks on this host; it cannot reach others."""
        self._stopped.set()
        for rank, host in self._hosts.items():
            if host == self._hosts[0]:
                self._kill(rank)

    def _kill(self, rank: int) -> None:
        if rank in self._processes and self._processes[rank].returncode is None:
            self._processes[rank].kill()


def _main(place: Any, directory: Path, rank: int) -> int:
    """Replaces `rank_main.main`: a rank learns of its node's end only by its connections."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = wire.spec_path(directory, rank)
    spec = msgspec.msgpack.decode(path.read_bytes(), type=WorkerSpec)
    node = msgspec.msgpack.decode((directory / ADDRESS).read_bytes(), type=wire.NodeAddress)
    path.unlink()
    hosts.enter(place(spec))
    return rank_main.run_rank(spec, node)
