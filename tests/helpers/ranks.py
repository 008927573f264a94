"""Rank processes that run functions of tests; spawned once for many tests."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from forked_ranks import warm
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
        context = warm()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder, timeout, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

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
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, folder: Path, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
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
