"""This process on its host: cores, memory, ports, file limits, environment, identity.

A cgroup's limit (version 1 or 2) applies to all groups below it, so the tightest limit between the
process's group and the root of the mount counts. A container sees its own group as that root.
Cpusets are not read: they show in the process's affinity.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import ipaddress
import logging
import os
import platform
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from pdserve.common.core.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")
_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}:([0-9]{1,5})")


def cpu_flags() -> frozenset[str]:
    """Returns the CPU's features in the kernel's names, such as "avx2"; empty if unknown."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


# ---- cgroup limits, version 1 and 2 ----

PROC = Path("/proc/self")
UNIFIED = ""  # version 2 has one hierarchy, without controller names


def usable_cores(proc: Path = PROC) -> int:
    """Returns the number of cores this process can keep busy, at least 1: the smaller of affinity
    and CPU quota. A quota of 1.5 counts as 1: a second thread would be throttled half of the time,
    and the first one would wait for it."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(int(quota) for quota in _cpu_quotas(proc))]))


def memory_left(proc: Path = PROC) -> int | None:
    """Returns the bytes left until a memory limit of this process's cgroups, None without a limit.
    Cached files, which the kernel reclaims, count as free."""
    left = [limit - used for limit, used in _memory_limits(proc)]
    return max(0, min(left)) if left else None


def memory_limit(proc: Path = PROC) -> int | None:
    """Returns the tightest memory limit of this process's cgroups in bytes, None without one."""
    return min((limit for limit, _ in _memory_limits(proc)), default=None)


def _cpu_quotas(proc: Path) -> Iterator[float]:
    for group in _groups("cpu", proc):
        quota, period = (*_words(group / "cpu.max"), "", "")[:2]
        if not quota:  # version 1
            quota = "".join(_words(group / "cpu.cfs_quota_us"))
            period = "".join(_words(group / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():  # neither "max" nor -1
            yield int(quota) / int(period)


def _memory_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit and the bytes used of it."""
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
                yield int(most), int(taken) - int(numbers.get(cached, 0))


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """Yields the cgroup folders that may limit this process, from its own upwards."""
    own = _memberships(proc)
    for name, root, mount in _mounts(proc):
        if name not in (controller, UNIFIED) or name not in own:
            continue
        below = os.path.relpath(own[name], root)
        # If the group lies outside the mount, the mount's root is the nearest one visible.
        folder = mount if below.startswith("..") else mount / below
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _memberships(proc: Path) -> dict[str, str]:
    """Returns controller → this process's group (cgroups(7): `5:cpu,cpuacct:/group`,
    `0::/group`)."""
    found = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts(proc: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields (controller, mounted group, mount point) from mountinfo (proc_pid_mountinfo(5))."""
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
    """Returns the file's lines; none if it does not exist (another system, or no limit)."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# ---- errors of the host, with a fix ----


def _advice(number: int | None) -> str | None:
    return {
        errno.ENOSPC: "free some space there, or choose another folder",
        errno.EDQUOT: "free some space there, or raise the quota",
        errno.EROFS: "mount it writable (in a container: a volume or a tmpfs)",
        errno.EACCES: f"give user {os.getuid()}, which this process runs as, access (chmod, chown)",
        errno.EPERM: f"give user {os.getuid()}, which this process runs as, access (chmod, chown)",
        errno.ENOENT: "create it first, or correct the path",
        errno.ENOTDIR: "correct the path",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "raise fs.file-max: the whole host has too many open files",
        errno.ENOMEM: "give more memory",
        errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's pids limit)",
    }.get(number or 0)


@contextmanager
def host_errors_as_config_errors() -> Iterator[None]:
    """Turns an OSError with a known fix (disk full, no permission, …) into a ConfigError. Used
    while a process starts.

    Raises:
        ConfigError: in place of such an OSError; other exceptions pass unchanged.
    """
    try:
        yield
    except OSError as error:
        advice = _advice(error.errno)
        if advice is None:
            raise
        path = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{path}{error.strerror}: {advice}") from error


AMPLE_FILES = 8192  # a shell's usual limit of 1024 is low for a server


def raise_open_file_limit(count: int, lower: str = "") -> None:
    """Raises this process's limit of open files to AMPLE_FILES or `count`, as far as the hard limit
    allows. `lower` names options that reduce `count`, for the error message.

    Raises:
        ConfigError: the hard limit is below `count`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(AMPLE_FILES, count)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if most < count:
        advice = f"raise the limit (ulimit -n {count}){f', or lower {lower}' if lower else ''}"
        raise ConfigError(f"this process may open {most} files and needs up to {count}: {advice}")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_file_limit() -> int:
    """Returns this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return AMPLE_FILES if soft == resource.RLIM_INFINITY else soft


def bind(host: str, port: int, purpose: str, flag: str, shared: bool = False) -> socket.socket:
    """Returns a socket bound to the port (0: a free one) that does not listen yet. `shared`: other
    processes of this user may bind and listen there, too.

    Raises:
        ConfigError: the port is taken, or the address is not this host's. `purpose` and `flag` are
            for the message.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
        # SO_REUSEADDR lets a restarted process take its port while old connections linger. Not for
        # a port the kernel chose: another process could bind it until we listen.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, purpose, flag, error) from error
    return bound


def cannot_listen(host: str, port: int, purpose: str, flag: str, error: OSError) -> ConfigError:
    advice = {
        errno.EADDRINUSE: f": choose another {flag} (0: a free one)",
        errno.EACCES: f": choose {flag} above 1023",
        errno.EADDRNOTAVAIL: ": --host must be an address of this host",
        socket.EAI_NONAME: ": --host must be an address of this host",
    }.get(error.errno or 0, "")
    return ConfigError(f"cannot listen on {host}:{port} for {purpose}: {error.strerror}{advice}")


# ---- host identity, addresses, processes ----


def host_identity() -> str:
    """Returns a string that is equal for two processes exactly if they can share memory, loopback
    and abstract sockets: same running kernel and network namespace. (Containers may share a host
    name without that, or that without a host name.)"""
    network = Path("/proc/self/ns/net")
    if not network.exists():
        return socket.gethostname()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{network.stat().st_ino}"


def is_address(text: str) -> bool:
    """Returns whether `text` has the form HOST:PORT; does not resolve the name."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address or "localhost". Other names are not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_OPTIONS = ("PDSERVE_", "VLLM_")
CACHE_VARIABLE = "PDSERVE_CACHE"
CONFIG_EXIT_CODE = "PDSERVE_CONFIG_EXIT_CODE"  # read by pdserve/cli/main.py
# Words in the names of variables that hold secrets, and the form of a URL with a password.
_SECRET_WORDS = frozenset(
    {"AUTH", "AUTHORIZATION", "CREDENTIAL", "CREDENTIALS", "HEADERS", "KEY", "KEYS", "PASSPHRASE",
     "PASSWD", "PASSWORD", "SECRET", "SECRETS", "TOKEN", "APIKEY"}
)  # fmt: skip
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def role_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a role process: this one's without options, PDSERVE_ ones and
    those of vLLM that were taken for some, plus `added`."""
    own = os.environ.items()
    kept = {
        name: each for name, each in own if name == CACHE_VARIABLE or not name.startswith(_OPTIONS)
    }
    return {**kept, **added}


def helper_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for a helper process that needs no credentials: a role's without
    secrets, so that a compromised helper cannot leak them."""
    kept = role_environment({})
    found = {name: each for name, each in kept.items() if not _is_secret(name, each)}
    return {**found, **(added or {})}


def _is_secret(name: str, value: str) -> bool:
    words = re.split("[^A-Z0-9]+", name.upper())
    return not _SECRET_WORDS.isdisjoint(words) or _WITH_PASSWORD.search(value) is not None


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # loaded before any fork


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends for any reason (Linux)."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def loading() -> Iterator[None]:
    """Turns garbage collection off while modules are imported, and freezes what they created. This
    saves a sixth of torch's import time, and tens of milliseconds per later full collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Flushes logs and streams and ends this process at once: a normal interpreter exit would take
    half as long to unload torch as it took to load it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(code)


# ---- files ----


def default_cache_dir() -> Path:
    """Returns `$PDSERVE_CACHE` or `~/.cache/pdserve`. Its content can be deleted at any time."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "pdserve")


def cpu_name() -> str:
    """Returns the model name of this host's CPU, or what the platform module knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
