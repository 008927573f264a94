"""Rank processes that run functions of tests; started once for many tests."""

from __future__ import annotations

import os
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from forked_ranks import end, start
from pdserve.common.distributed.environment import init_distributed_environment
from pdserve.common.distributed.parallel_state import (
    ParallelState,
    initialize_model_parallel,
)

PATIENCE = 240.0  # seconds for an answer; the first one includes importing torch
Work = Callable[..., Any]
"""Called as `work(state, *args)` in each rank; a module's function."""


class Ranks:
    """`run` returns the results of all ranks, or fails with the traceback of one."""

    def __init__(self, size: int, folder: Path, timeout: float = 60.0) -> None:
        address = f"\0pdserve-ranks-{uuid.uuid4()}"
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        with Listener(address) as listener:
            for rank in range(size):
                self.pids.append(start(__name__, str(rank), str(folder), str(timeout), address))
                self._pipes.append(listener.accept())  # type: ignore[arg-type]

    def run(self, work: Work, *args: Any, **layout: Any) -> list[Any]:
        """`layout`: tp, pp, ep, communicator, hosts. Uses the first tp * pp ranks. `hosts`: a
        letter per rank; ranks with different letters count as on different hosts."""
        count = self.start(work, *args, **layout)
        return self.results(range(count))

    def start(self, work: Work, *args: Any, **layout: Any) -> int:
        count: int = layout.get("tp", 1) * layout.get("pp", 1)
        for pipe in self._pipes[:count]:
            pipe.send((work, args, layout))
        return count

    def results(self, ranks: Any, seconds: float = PATIENCE) -> list[Any]:
        answers = {}
        for rank in ranks:
            assert wait([self._pipes[rank]], seconds), f"rank {rank} does not answer"
            answers[rank] = self._pipes[rank].recv()
        for rank, (error, _) in answers.items():
            assert not error, f"rank {rank}: {error}"
        return [result for _, result in answers.values()]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def close(self) -> None:
        for pid in self.pids:
            end(pid)


def main(flags: list[str]) -> int:
    rank, folder, timeout, address = flags
    torch.set_num_threads(1)
    with suppress(EOFError), Client(address) as pipe:  # until the test's process is gone
        _serve(int(rank), Path(folder), float(timeout), pipe)  # type: ignore[arg-type]
    return 0


def _serve(rank: int, folder: Path, timeout: float, pipe: Connection) -> None:
    states: dict[str, ParallelState] = {}
    while True:
        work, args, layout = pipe.recv()
        try:
            name = "-".join(f"{key}{value}" for key, value in sorted(layout.items()))
            if name not in states:
                states[name] = _meet(rank, folder / name, timeout, **layout)
            with torch.inference_mode():
                answer = ("", work(states[name], *args))
        except Exception:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


def _meet(
    rank: int,
    file: Path,
    timeout: float,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    communicator: str = "auto",
    hosts: str = "",
) -> ParallelState:
    where = f"file://{file}"
    environment = init_distributed_environment(
        rank, tp * pp, where, timeout=timeout, communicator=communicator
    )
    environment.hosts = tuple(hosts) or environment.hosts
    return initialize_model_parallel(environment, tp, pp, ep)
