"""Restarts of a child process: at once, then after 1, 2, 4 and 8 seconds if each run lasts less
than a minute. After the fifth such restart it stays down."""

from __future__ import annotations

import asyncio
from time import monotonic

from pdserve.cli.child import Child, Write
from pdserve.common.core.errors import ConfigError

FIRST_BACKOFF, LAST_BACKOFF = 1.0, 30.0  # seconds; doubled from the second end in a row on
MAX_RESTARTS = 5  # consecutive
SETTLED = 60.0  # seconds of uptime that reset the count


class Restarts:
    """Restarts one child, which has been started, and counts how often it ended in a row."""

    def __init__(self, child: Child, write: Write) -> None:
        self._child = child
        self._write = write
        self._since = monotonic()
        self._ends = 0

    async def restart(self, code: int) -> bool:
        """Restarts the child, which ended with this exit code; returns False if it stays down."""
        self._ends = 1 if monotonic() - self._since >= SETTLED else self._ends + 1
        if self._ends > MAX_RESTARTS:
            return False
        backoff = FIRST_BACKOFF * 2 ** (self._ends - 2) if self._ends > 1 else 0.0
        when = f"in {backoff:.0f} s" if backoff else "now"
        self._write("up", f"{self._child.name}: {_exit(code)}; restart {when}")
        await self._start(backoff)
        self._since = monotonic()
        return True

    async def _start(self, backoff: float) -> None:
        """Retries until the process runs: the host may be short of memory or process slots."""
        while True:
            await asyncio.sleep(backoff)
            backoff = min(max(2 * backoff, FIRST_BACKOFF), LAST_BACKOFF)
            try:
                await self._child.start()
                return
            except (OSError, ConfigError) as error:
                why = error.message if isinstance(error, ConfigError) else error.strerror
                self._write("up", f"{self._child.name}: {why}; retry in {backoff:.0f} s")

    def describe(self, code: int) -> str:
        """Returns how the child ended, and how often in a row if it stays down."""
        if self._ends > MAX_RESTARTS:
            return (
                f"{self._child.name} ended {self._ends} times in a row, at last with {_exit(code)}"
            )
        return f"{self._child.name} ended with {_exit(code)}"


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
