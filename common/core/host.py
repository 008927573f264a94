"""What the host refuses a process that starts, as a sentence that says the mend."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from common.core.errors import ConfigError

AMPLE_FILES = 8192  # a shell's usual 1024 are few for a server


def _mend(number: int | None) -> str | None:
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
def refusals() -> Iterator[None]:
    """For the start of a process: a full disk, a missing right and the like end it as a wrong
    option does. What is no refusal of the host's passes as it is.

    Raises:
        ConfigError: instead of such an OSError.
    """
    try:
        yield
    except OSError as error:
        mend = _mend(error.errno)
        if mend is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{place}{error.strerror}: {mend}") from error


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
        raise no_port(host, port, purpose, flag, error) from error
    return bound


def no_port(host: str, port: int, purpose: str, flag: str, error: OSError) -> ConfigError:
    mend = f": choose another {flag} (0: a free one)" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {host}:{port} for {purpose}: {error.strerror}{mend}")


def allow_open_files(count: int, lower: str = "") -> None:
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
        mend = f"raise the limit (ulimit -n {count}){f', or lower {lower}' if lower else ''}"
        raise ConfigError(f"this process may open {most} files and needs up to {count}: {mend}")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
