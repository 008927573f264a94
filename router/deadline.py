"""One deadline a request, made when it is accepted and carried to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from pdserve.common.core.errors import DeadlineExceeded


class Deadline:
    """Two bounds, both moved by progress alone, never by another try.

    Waiting (for a place, for nodes, between tries) may take `queue_timeout` seconds in all
    until the first token; from then on `request_timeout`, anew after every token, for a node
    that comes back is worth more to a half-read answer than an error. While nodes work on the
    request, `request_timeout` seconds may pass without progress (0: any time).
    """

    def __init__(self, queue_timeout: float, request_timeout: float) -> None:
        self._made = monotonic()
        self._request_timeout = request_timeout or None
        self._patience = queue_timeout
        self._limit: asyncio.Timeout | None = None

    @property
    def patience(self) -> float:
        """Seconds it may still wait."""
        return self._patience

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Bounds what is inside; the time until here was spent on waiting for a place.

        Raises:
            DeadlineExceeded: nothing happened for too long.
        """
        waited = monotonic() - self._made
        if waited < self._patience:  # else it is a body's later prompt: its time begins here
            self._patience -= waited
        limit = asyncio.timeout(self._request_timeout)
        try:
            async with limit as self._limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the request made no progress for {self._request_timeout:g} s"
            ) from None
        finally:
            self._limit = None

    def progress(self) -> None:
        """It got further: blocks were reserved, KV has landed."""
        if self._limit is not None and self._request_timeout and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._request_timeout)

    def token(self) -> None:
        """A token is on its way to the client."""
        self._patience = self._request_timeout or float("inf")
        self.progress()

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Waiting for a node rather than on one; yields until when (`monotonic`)."""
        since = monotonic()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
        try:
            yield since + self._patience
        finally:
            self._patience -= monotonic() - since
            self.progress()
