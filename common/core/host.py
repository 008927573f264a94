"""This process on its host: what it may use, what it is refused, what it shares with others.

A limit of a cgroup (version 1 or 2) holds for every group below it, so the tightest between the
process's own group and the root of the mount counts. A container sees its own group as that root.
Cpusets need no reading: the kernel shows them as the process's affinity.
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
    """What the CPU can do, in the kernel's words, such as "avx2"; empty where unknown."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


# ---- the limits of its cgroups, version 1 and 2 ----

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


# ---- what the host refuses, as a sentence that says what helps ----


def _advice(number: int | None) -> str | None:
    return {
        errno.ENOSPC: "free some space there, or choose another place",
        errno.EDQUOT: "free some space there, or raise the quota",
        errno.EROFS: "mount it writable (in a container: a volume or a tmpfs)",
        errno.EACCES: f"this process runs as user {os.getuid()}: let that user in (chmod, chown)",
        errno.EPERM: f"this process runs as user {os.getuid()}: let that user in (chmod, chown)",
        errno.ENOENT: "make it first, or correct the path",
        errno.ENOTDIR: "correct the path",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "the whole host has too many open files: raise fs.file-max",
        errno.ENOMEM: "give more memory",
        errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's pids limit)",
    }.get(number or 0)


@contextmanager
def host_errors_as_config_errors() -> Iterator[None]:
    """For the start of a process: a full disk, a missing right and the like end it as a wrong
    option does. What is no refusal of the host's passes as it is.

    Raises:
        ConfigError: instead of such an OSError.
    """
    try:
        yield
    except OSError as error:
        advice = _advice(error.errno)
        if advice is None:
            raise
        path = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{path}{error.strerror}: {advice}") from error


AMPLE_FILES = 8192  # a shell's usual 1024 are few for a server


def raise_open_file_limit(count: int, lower: str = "") -> None:
    """Raises this process's own limit of open files as far as the host lets it, to AMPLE_FILES or
    `count`. `lower` names options that need fewer.

    Raises:
        ConfigError: the host does not let it have `count`.
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
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return AMPLE_FILES if soft == resource.RLIM_INFINITY else soft


def bind(host: str, port: int, purpose: str, flag: str) -> socket.socket:
    """A socket with the port (0: a free one), on which nobody listens yet.

    Raises:
        ConfigError: another process listens there, or the address is not this host's; `purpose`
            and `flag` are for the message.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
        # A restarted process takes its port again although connections to the last one linger. One
        # that the kernel chooses is nobody else's, and must stay so until somebody listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, purpose, flag, error) from error
    return bound


def cannot_listen(host: str, port: int, purpose: str, flag: str, error: OSError) -> ConfigError:
    advice = f": choose another {flag} (0: a free one)" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {host}:{port} for {purpose}: {error.strerror}{advice}")


# ---- this host among others, this process below its parent ----


def host_identity() -> str:
    """Equal for two processes exactly where they share memory, loopback and abstract sockets: the
    same running kernel and the same network namespace. (Containers may share a host name and
    nothing else, or the reverse.)"""
    network = Path("/proc/self/ns/net")
    if not network.exists():
        return socket.gethostname()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{network.stat().st_ino}"


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT, as roles announce themselves; what a name leads to is not asked."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def is_loopback(host: str) -> bool:
    """Whether `host` is an address, or the usual name, that never leaves this host; other names may
    mean anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_OPTIONS = "PDSERVE_"
_CACHE = _OPTIONS + "CACHE"
# Words of the names under which programs find secrets, and an address with a password in it.
_SECRET_WORDS = frozenset(
    {"AUTH", "AUTHORIZATION", "CREDENTIAL", "CREDENTIALS", "HEADERS", "KEY", "KEYS", "PASSPHRASE",
     "PASSWD", "PASSWORD", "SECRET", "SECRETS", "TOKEN", "APIKEY"}
)  # fmt: skip
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def role_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role that this process starts: its own without options, which the role
    gets one by one."""
    own = os.environ.items()
    kept = {name: each for name, each in own if name == _CACHE or not name.startswith(_OPTIONS)}
    return {**kept, **added}


def helper_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that works for this one and calls nobody: a role's without
    secrets. Whoever takes such a process over finds none."""
    kept = role_environment({})
    found = {name: each for name, each in kept.items() if not _is_secret(name, each)}
    return {**found, **(added or {})}


def _is_secret(name: str, value: str) -> bool:
    words = re.split("[^A-Z0-9]+", name.upper())
    return not _SECRET_WORDS.isdisjoint(words) or _WITH_PASSWORD.search(value) is not None


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # loaded before any fork


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however that ends (Linux)."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def loading() -> Iterator[None]:
    """Modules are loaded meanwhile, and stay: nobody looks among them for what may go. That takes a
    sixth of the time to load torch, and tens of milliseconds of each full collection later on."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Ends this process now that nothing is left to do but to write its last lines: Python would
    take half as long to unload torch as it took to load it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(code)


# ---- its files ----


def default_cache_dir() -> Path:
    """`$PDSERVE_CACHE`, or `~/.cache/pdserve`: what is made once and may be deleted."""
    return Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "pdserve")


def cpu_name() -> str:
    """Of this host's CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
