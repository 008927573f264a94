"""The transfer libraries that `bench_transfer.py` compares with: each runs in its own processes
(`move_blocks.py`), with a Python that has it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.compared.servers import Absent

SCRIPT = Path(__file__).with_name("move_blocks.py")
NAMES = ("nixl", "mooncake")
TIMEOUT = 120.0  # seconds for a library to start, or for one transfer
STOP_TIMEOUT = 10.0
AWAKE_S = 0.002  # seconds for both processes to resume before a transfer


class Mover:
    """Moves blocks between two processes of its own, which are stopped while others have their
    turn: both libraries poll, which would take a core from what is being measured. Raises
    `Absent`."""

    def __init__(self, name: str, python: str, planes: int, blocks: int, run_nbytes: int) -> None:
        shape = (str(planes), str(blocks), str(run_nbytes))
        self.name = name
        try:
            self._process = subprocess.Popen(
                [python, str(SCRIPT), name, *shape],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": ""},  # nothing of ours
                text=True,
                process_group=0,
            )
        except OSError as error:
            raise Absent(f"{python}: {error.strerror}") from error
        try:
            self.version = str(self._answer()["ready"])
        except Absent:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def move(self, theirs: Sequence[int], ours: Sequence[int]) -> float:
        """Moves these blocks of one end to those of the other; returns the seconds."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        time.sleep(AWAKE_S)
        with suppress(BrokenPipeError):  # its last output has the reason
            self._process.stdin.write(json.dumps([theirs, ours]) + "\n")
            self._process.stdin.flush()
        seconds = float(self._answer())
        self._signal(signal.SIGSTOP)
        return seconds

    def _answer(self) -> Any:
        pipe = self._process.stdout
        assert pipe is not None
        readable = select.poll()
        readable.register(pipe, select.POLLIN)
        if not readable.poll(1000 * TIMEOUT):
            raise Absent(f"no answer in {TIMEOUT:.0f} s")
        if not (line := pipe.readline()):
            raise Absent(f"it ended with status {self._process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "absent" in answer:
            raise Absent(answer["absent"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Peers:
    """The libraries to compare with, and why others are missing."""

    def __init__(self, names: Sequence[str], python: str) -> None:
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self._names = names
        self._python = python

    @contextmanager
    def running(self, planes: int, blocks: int, run_nbytes: int) -> Iterator[list[Mover]]:
        """Yields running movers with caches of this geometry at both ends."""
        movers: list[Mover] = []
        with ExitStack() as stack:
            for name in self._names:
                if name in self.absent:
                    continue
                try:
                    mover = Mover(name, self._python, planes, blocks, run_nbytes)
                except Absent as error:
                    self.absent[name] = str(error)
                    continue
                stack.callback(mover.close)
                movers.append(mover)
                self.versions[name] = mover.version
            yield movers
