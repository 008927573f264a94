"""Names in /dev/shm, which all tests of a host share."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

SHM = "/dev/shm"
LEFT_ON_PURPOSE = "pdserve-broken-"  # prefix of names that broken connectors leave on purpose


def names() -> set[str]:
    return {name for name in os.listdir(SHM) if not name.startswith(LEFT_ON_PURPOSE)}


def check_none_left(before: set[str], within: float = 60.0) -> None:
    """Checks that no name since `before` (from `names`) stays without a process that maps it; names
    that other processes map are theirs."""
    deadline = time.monotonic() + within  # other processes' names are unmapped for moments
    while left := names() - before - _in_use():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _in_use() -> set[str]:
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            maps = (process / "maps").read_text().splitlines()
            names |= {line.partition(f" {SHM}/")[2] for line in maps}
    return names
