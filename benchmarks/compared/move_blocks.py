"""Moves blocks between two processes with a transfer library. It is run by a Python that has the
library and numpy, and needs nothing of pdserve. `movers.py` starts it:

    VENV/bin/python benchmarks/compared/move_blocks.py {nixl|mooncake} PLANES BLOCKS RUN_NBYTES

A cache is `PLANES` planes (a layer's keys or values) of `BLOCKS` blocks, each with `RUN_NBYTES`
contiguous bytes per plane. Each line of stdin is a JSON list `[their_ids, our_ids]`: blocks of the
passive process and of this one; the answer is a line with the seconds that the move took. After the
first move the checksums of both sides must be equal. The first line of output is `{"ready":
version}`, or `{"absent": why}` and then nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from multiprocessing.connection import Connection
from typing import Any, TextIO

import numpy as np

TIMEOUT = 60.0  # seconds for the passive process to start
BATCH = 1024  # runs; Mooncake's queue refuses more
Ids = Sequence[int]


class Library:
    """One end. `cache`: uint8 (planes, blocks, bytes of a run)."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        planes, blocks, run = cache.shape
        self._first = np.arange(planes, dtype=np.int64)[:, None] * blocks  # run of block 0
        self._run = run

    def runs(self, ids: Ids) -> Any:
        """Returns the indices of the runs of these blocks, plane by plane."""
        return (self._first + np.asarray(ids, dtype=np.int64)).reshape(-1)

    def address(self) -> tuple[Any, int]:
        """Returns this process's address and the start of its cache, for the other end."""
        raise NotImplementedError

    def connect(self, address: tuple[Any, int]) -> None:
        raise NotImplementedError

    def move(self, theirs: Ids, ours: Ids) -> None:
        """Moves blocks; returns when all bytes have arrived."""
        raise NotImplementedError


class Nixl(Library):
    """NIXL over UCX. The sink reads, as in vLLM's connector: all runs are prepared once, and a
    transfer names the runs to read."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        from nixl import nixl_agent, nixl_agent_config

        config = nixl_agent_config(backends=["UCX"])
        self._agent = nixl_agent(f"bench-{os.getpid()}", config)
        self._agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")

    def address(self) -> tuple[Any, int]:
        return self._agent.get_agent_metadata(), self.cache.ctypes.data

    def connect(self, address: tuple[Any, int]) -> None:
        metadata, base = address
        peer = self._agent.add_remote_agent(metadata)
        self._theirs = self._prepare(peer, base)
        self._ours = self._prepare("NIXL_INIT_AGENT", self.cache.ctypes.data)

    def _prepare(self, agent: str, base: int) -> Any:
        count = self.cache.nbytes // self._run
        runs = np.zeros((count, 3), dtype=np.uint64)  # address, bytes, device
        runs[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(self._run)
        runs[:, 1] = self._run
        return self._agent.prep_xfer_dlist(agent, runs, "DRAM")

    def move(self, theirs: Ids, ours: Ids) -> None:
        wanted, places = (self.runs(ids).astype(np.int32) for ids in (theirs, ours))
        agent = self._agent
        handle = agent.make_prepped_xfer("READ", self._ours, places, self._theirs, wanted)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")


class Mooncake(Library):
    """Mooncake over TCP. The source writes as many runs at a time as its queue takes."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._expect(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._expect(self._engine.register_memory(cache.ctypes.data, cache.nbytes))

    def address(self) -> tuple[Any, int]:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self.cache.ctypes.data

    def connect(self, address: tuple[Any, int]) -> None:
        self._peer, self._base = address

    def move(self, theirs: Ids, ours: Ids) -> None:
        places = (self._base + self.runs(theirs) * self._run).tolist()
        data = (self.cache.ctypes.data + self.runs(ours) * self._run).tolist()
        lengths = [self._run] * BATCH
        for start in range(0, len(data), BATCH):
            part = slice(start, start + BATCH)
            batch = data[part], places[part], lengths[: len(data) - start]
            self._expect(self._engine.batch_transfer_sync_write(self._peer, *batch))

    def _expect(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"the engine answers {status}")


LIBRARIES: dict[str, type[Library]] = {"nixl": Nixl, "mooncake": Mooncake}


def filled(shape: tuple[int, ...]) -> Any:
    """Returns a cache with random bytes, different in every process."""
    return np.random.default_rng(os.getpid()).integers(0, 256, shape, dtype=np.uint8)


def checksum(cache: Any, ids: Ids) -> int:
    return zlib.crc32(np.ascontiguousarray(cache[:, list(ids)]))


def passive(name: str, shape: tuple[int, ...], control: Connection) -> None:
    """Runs the passive end: sends its address, then checksums on request, until EOF."""
    library = LIBRARIES[name](filled(shape))
    control.send(library.address())
    try:
        while True:
            control.send(checksum(library.cache, control.recv()))
    except EOFError:
        os._exit(0)  # some libraries' threads do not end


def serve(name: str, shape: tuple[int, ...], answers: TextIO) -> None:
    library = LIBRARIES[name](filled(shape))
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=passive, args=(name, shape, theirs), daemon=True).start()
    theirs.close()
    if not ours.poll(TIMEOUT):
        raise RuntimeError("the other process does not start")
    library.connect(ours.recv())
    answer(answers, {"ready": _version(name)})
    for number, line in enumerate(sys.stdin):
        their_ids, our_ids = json.loads(line)
        started = time.perf_counter()
        library.move(their_ids, our_ids)
        seconds = time.perf_counter() - started
        if number == 0:
            ours.send(their_ids)
            if ours.recv() != checksum(library.cache, our_ids):
                raise RuntimeError("the blocks differ after the transfer")
        answer(answers, seconds)


def _version(name: str) -> str:
    """Returns the version of the first installed package of several names."""
    found = sorted(set(packages_distributions().get(name, ())))
    return ", ".join(f"{package} {version(package)}" for package in found)


def answer(answers: TextIO, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def main() -> None:
    name, *shape = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    try:
        serve(name, tuple(map(int, shape)), answers)
    except Exception as error:
        answer(answers, {"absent": f"{type(error).__name__}: {error}"})
    os._exit(0)


if __name__ == "__main__":
    main()
