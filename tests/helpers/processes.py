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
