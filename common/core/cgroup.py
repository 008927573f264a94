"""What this process may use of its host: the limits of its cgroups, version 1 and 2.

A limit holds for every group below it, so the tightest between the process's own group and the
root of the mount counts. A container sees its own group as that root. Cpusets need no reading:
the kernel shows them as the process's affinity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")
UNIFIED = ""  # version 2 has one hierarchy, without a controller's name


def usable_cores(proc: Path = PROC) -> int:
    """Cores this process may keep busy, at least 1: its affinity, or a CPU quota below it. Of a
    quota of 1.5 that is 1: a second thread would stand still half the time, and the first one
    would wait for it."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(int(quota) for quota in _cpu_quotas(proc))]))


def memory_left(proc: Path = PROC) -> int | None:
    """Bytes this process may still take before a limit of its cgroups is met; None: they have
    none. What the kernel would give back by itself, cached files, counts as free."""
    left = list(_memory_left(proc))
    return max(0, min(left)) if left else None


def _cpu_quotas(proc: Path) -> Iterator[float]:
    for group in _groups("cpu", proc):
        quota, period = (*_words(group / "cpu.max"), "", "")[:2]
        if not quota:  # version 1
            quota = "".join(_words(group / "cpu.cfs_quota_us"))
            period = "".join(_words(group / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():  # neither "max" nor -1
            yield int(quota) / int(period)


def _memory_left(proc: Path) -> Iterator[int]:
    for group in _groups("memory", proc):
        for limit, usage, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = "".join(_words(group / limit)), "".join(_words(group / usage))
            if most.isdigit() and taken.isdigit():
                stat = _words(group / "memory.stat")
                numbers = dict(zip(stat[::2], stat[1::2], strict=False))
                yield int(most) - int(taken) + int(numbers.get(cached, 0))


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """The folders of this process's groups that may limit it, from its own up."""
    own = _memberships(proc)
    for name, root, mount in _mounts(proc):
        if name not in (controller, UNIFIED) or name not in own:
            continue
        below = os.path.relpath(own[name], root)
        # A group outside what is mounted: the mount's root is the nearest one to be seen.
        folder = mount if below.startswith("..") else mount / below
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _memberships(proc: Path) -> dict[str, str]:
    """This process's group by controller (cgroups(7): `5:cpu,cpuacct:/group`, `0::/group`)."""
    found = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts(proc: Path) -> Iterator[tuple[str, str, Path]]:
    """(controller, the group that is mounted, where) from mountinfo (proc_pid_mountinfo(5))."""
    for line in _lines(proc / "mountinfo"):
        mount, _, source = line.partition(" - ")
        kind, *_, options = source.split()
        root, point = mount.split()[3:5]
        names = {"cgroup2": [UNIFIED], "cgroup": options.split(",")}.get(kind, [])
        for name in names:
            yield name, root, Path(point)


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """Empty when there is no such file: on another system, and in groups without a limit."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
