"""Runs of the conformance kit and its remote ranks, forked from a process that is warm."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.warm_ranks import Zygote
from pdserve.kv_transfer.conformance import peer, remote
from warm import run_roles

ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "told")  # of pytest


def run(folder: Path, arguments: list[str], patience: float) -> tuple[int, str]:
    """Runs pytest in `folder`; returns its exit code and output."""
    ((code, said),) = run_roles(folder, [[__name__, str(folder), *arguments]], patience)
    return code, said


def main(flags: list[str]) -> int:
    """Runs in the fork, while it has one thread."""
    folder, *arguments = flags
    os.chdir(folder)
    sys.path.insert(0, folder)
    zygote = Zygote(_serve)
    remote.start_peer = lambda sock: Peer(zygote.fork("peer", sock.fileno()))  # type: ignore
    code = pytest.main([*ARGUMENTS, *arguments])
    zygote.close()
    return int(code)


def _serve(_: str) -> int:
    peer.main(0)
    return 0


class Peer:
    """The part of `subprocess.Popen` that the kit uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self._pid, flags)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
