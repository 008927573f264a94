"""Questions about processes that may end while they are asked."""

import psutil


def alive(pid: int) -> bool:
    """Returns whether the process is running; zombies are not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> list[str]:
    """Returns the command line; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def descendants() -> set[psutil.Process]:
    """Returns this process's descendants, without the process from which the clusters of all pytest
    workers are forked, and without its children."""
    return {
        each
        for child in psutil.Process().children()
        if not any(part.endswith("warm_start.py") for part in command(child))
        for each in (child, *child.children(recursive=True))
    }
