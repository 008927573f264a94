"""Work in a child with bounds: it ends in a result or in none, and never holds its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, time
from pdserve.common.core.errors import Unavailable
from pdserve.common.core.apart import Bounds, run_apart

def hold():
    return bytes(2**30)

def spin():
    while True:
        pass

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"late"

def fail():
    raise ValueError

works = {"answer": lambda: b"x" * 2**20, "memory": hold, "time": spin, "stopped": stop,
         "asleep": lambda: time.sleep(60), "failed": fail}
wall = 2 if "NAME" in ("stopped", "asleep") else 50
try:
    outcome = run_apart(works["NAME"], Bounds(cpu_seconds=0.3, memory=2**26, wall_seconds=wall))
    print(None if outcome.result is None else len(outcome.result), outcome.seconds < 2)
except Unavailable as error:
    print(error.code, True)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("answer", 2**20),
        *((name, None) for name in ("memory", "time", "failed")),
        # Not the work's fault: the host may be busy.
        *((name, "PREPARATION_FAILED") for name in ("stopped", "asleep")),
    ],
)
def test_a_child_holds_its_parent_no_longer_than_its_bounds(
    name: str, result: int | str | None
) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("NAME", name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [f"{result} True", "no child is left"], done.stderr
