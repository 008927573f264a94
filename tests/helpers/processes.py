"""Questions about processes that may end while they are asked."""

import psutil


def alive(pid: int) -> bool:
    """Zombies, whose parent has not asked yet, are not alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> list[str]:
    """Empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def descendants() -> set[psutil.Process]:
    """This process's, without those of the one from which the clusters of all of pytest's workers
    are forked."""
    return {
        each
        for child in psutil.Process().children()
        if not any(part.endswith("warm_start.py") for part in command(child))
        for each in (child, *child.children(recursive=True))
    }
