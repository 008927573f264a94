"""Names in /dev/shm, which all tests of a host share."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

SHM = "/dev/shm"
LEFT_ON_PURPOSE = "pdserve-broken-"  # by connectors which a check must catch: how names begin


def names() -> set[str]:
    return {name for name in os.listdir(SHM) if not name.startswith(LEFT_ON_PURPOSE)}


def check_none_left(before: set[str], within: float = 60.0) -> None:
    """No name that came since `before` stays without a process that maps it: what others'
    processes use is theirs. `before`: as `names` gave them."""
    deadline = time.monotonic() + within  # those of others are nobody's while they begin or end
    while left := names() - before - _in_use():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _in_use() -> set[str]:
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            maps = (process / "maps").read_text().splitlines()
            names |= {line.partition(f" {SHM}/")[2] for line in maps}
    return names
