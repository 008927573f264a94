"""A folder whose files this process executes.

It is opened one part of its path after the other, each from the one before, and each is checked
once it is open: what was checked cannot be exchanged before it is used. A user who may replace a
folder on the way may replace all below it, so all of them are checked, and links as well (as
OpenSSH does with the path of a user's keys).
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

MAX_LINKS = 40  # on the way, as the kernel has it
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(path: Path) -> int:
    """A descriptor (O_PATH) of the folder, which is made if it is not there. Only this process's
    user and root may change what lies in it.

    Raises:
        OSError: it cannot be opened or made. A PermissionError says who could change it.
    """
    with ExitStack() as stack:

        def keep(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        root = folder = keep(os.open("/", _OPEN))
        trusted = frozenset({0, os.geteuid(), os.fstat(root).st_uid})  # who has / has everything
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
    """Whether such a file lies in the open folder.

    Raises:
        PermissionError: somebody else may change it.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    plain = stat.S_ISREG(status.st_mode)
    if not plain or status.st_uid != os.geteuid() or _others_write(status):
        raise PermissionError(
            f"{name} is no plain file, or another user's, or others may write to it: delete it"
        )
    return True


def _open_or_make(name: str, folder: int) -> int:
    try:
        return os.open(name, _OPEN, dir_fd=folder)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process has made it meanwhile
            os.mkdir(name, 0o700, dir_fd=folder)
        return os.open(name, _OPEN, dir_fd=folder)


def _check(status: os.stat_result, where: str, trusted: frozenset[int]) -> None:
    """Of a part of the way. Raises PermissionError if others may put another in its place, or in
    the place of what lies in it."""
    if status.st_uid not in trusted:
        raise PermissionError(f"{where} belongs to another user ({status.st_uid})")
    # In a sticky folder, such as /tmp, users replace only what is their own.
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
        return False  # its owner alone can replace it
    group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or group)


def _is_own_group(gid: int) -> bool:
    """Whether it is the group that many systems make for each user, with no other member."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
