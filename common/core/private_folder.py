"""Opens a folder that only this user can change, for files that this process executes.

The path is opened component by component, each relative to the one before and checked after it is
open, so that nothing can be exchanged between check and use. A user who can replace a component can
replace everything below it, so every component and symbolic link is checked (as OpenSSH checks the
path of a user's keys).
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

MAX_LINKS = 40  # symbolic links in a path; the kernel's limit
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(path: Path) -> int:
    """Opens the folder, creating it if necessary, and returns an O_PATH descriptor that the caller
    closes. Only this process's user and root can change its content.

    Raises:
        PermissionError: others could change it; the message says who.
        OSError: it cannot be opened or created.
    """
    with ExitStack() as stack:

        def keep(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        root = folder = keep(os.open("/", _OPEN))
        trusted = frozenset({0, os.geteuid(), os.fstat(root).st_uid})  # the owner of /
        seen, links, parts = "/", 0, deque(path.absolute().parts[1:])
        _check(os.fstat(root), seen, trusted)
        while parts:
            name = parts.popleft()
            child, where = keep(_open_or_make(name, folder)), os.path.join(seen, name)
            status = os.fstat(child)
            _check(status, where, trusted)
            if not stat.S_ISLNK(status.st_mode):
                folder, seen = child, where
                continue
            if (links := links + 1) > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink("", dir_fd=child))
            if target.is_absolute():
                folder, seen = root, "/"
            parts.extendleft(reversed(target.parts[target.is_absolute() :]))
        _check_leaf(os.fstat(folder), seen)
        return os.dup(folder)


def has_private_file(folder: int, name: str) -> bool:
    """Returns whether the open folder has a regular file of this name.

    Raises:
        PermissionError: others could change the file.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    plain = stat.S_ISREG(status.st_mode)
    if not plain or status.st_uid != os.geteuid() or _others_write(status):
        raise PermissionError(f"{name} is not a regular file, or others may write to it: delete it")
    return True


def _open_or_make(name: str, folder: int) -> int:
    try:
        return os.open(name, _OPEN, dir_fd=folder)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process has just created it
            os.mkdir(name, 0o700, dir_fd=folder)
        return os.open(name, _OPEN, dir_fd=folder)


def _check(status: os.stat_result, where: str, trusted: frozenset[int]) -> None:
    """Raises PermissionError if others can replace this path component or an entry of it."""
    if status.st_uid not in trusted:
        raise PermissionError(f"{where} belongs to another user ({status.st_uid})")
    # In a sticky folder, such as /tmp, users can replace only their own entries.
    if not status.st_mode & stat.S_ISVTX and _others_write(status):
        raise PermissionError(f"others may write to {where}: chmod go-w it")


def _check_leaf(status: os.stat_result, where: str) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), where)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{where} belongs to another user ({status.st_uid})")
    if _others_write(status):
        raise PermissionError(f"others may write to {where}: chmod go-w it")


def _others_write(status: os.stat_result) -> bool:
    if stat.S_ISLNK(status.st_mode):
        return False  # only its owner can replace it
    group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or group)


def _is_own_group(gid: int) -> bool:
    """Returns whether `gid` is the user's private group, with no other member."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
