"""The gate around a transfer's blocks, which `quiesce` closes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 0.25  # a thread inside has so long to leave before it is interrupted


def leaves_by_itself() -> None:
    """Does nothing: the `interrupt` of a thread that does not block inside, or checks `is_open`."""


class Gate:
    """Threads pass through it to read or write a transfer's blocks. Once `close` has returned, no
    thread is inside and none will enter.

    A thread inside should not wait for a peer, or only briefly and checking `is_open` in between:
    then a connection that transfers share need not be interrupted because of one of them.
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
        """Yields whether the caller may touch the blocks. `interrupt` is called from another thread
        and must make the caller leave soon, unless it leaves by itself."""
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
        """Admits no more threads and waits until the last one has left; after `grace` seconds the
        remaining ones are interrupted."""
        with self._changed:
            self._open = False
            if self._changed.wait_for(lambda: not self._inside, grace):
                return
            stuck = list(self._inside)
        for interrupt in stuck:
            interrupt()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
