"""Who is inside a transfer's blocks: the gate that `quiesce` shuts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 0.25  # whoever is inside may leave by itself for so long


def leaves_by_itself() -> None:
    """The `interrupt` of who waits for nobody inside, or looks at `is_open` meanwhile."""


class Gate:
    """Threads pass through it to read or write a transfer's blocks. Once `close` has
    returned nobody is inside and nobody will be.

    Best is not to wait for a peer inside, or only for moments, looking at `is_open` between them:
    then what is shared with other transfers (a connection) need not be interrupted for one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: list[Callable[[], None]] = []
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    @contextmanager
    def passage(self, interrupt: Callable[[], None] = leaves_by_itself) -> Iterator[bool]:
        """Yields whether the caller may touch the blocks. `interrupt` (called from another
        thread) must make it leave soon, unless it does so by itself."""
        with self._changed:
            admitted = self._open
            if admitted:
                self._inside.append(interrupt)
        try:
            yield admitted
        finally:
            if admitted:
                with self._changed:
                    self._inside.remove(interrupt)
                    self._changed.notify_all()

    def close(self, grace: float = GRACE_S) -> None:
        """Lets nobody in any more and waits until the last one left; after `grace` seconds
        those still inside are interrupted."""
        with self._changed:
            self._open = False
            if self._changed.wait_for(lambda: not self._inside, grace):
                return
            stuck = list(self._inside)
        for interrupt in stuck:
            interrupt()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
