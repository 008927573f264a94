"""Generations as one stream, made at their own pace: a client that reads slowly, or not at all,
holds no place on the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from pdserve.common.core.errors import Cancelled, PdserveError

T = TypeVar("T")

# Items a client may be behind with, each of a few hundred bytes; who is further behind is given up.
MAX_BEHIND = 16 * 1024


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields (source's index, item) as items come. The first error of any source ends all.

    A source ends when it has given its last item, whether or not that has been read. However
    this ends, all sources are closed when it has ended.

    Raises:
        Cancelled: more than MAX_BEHIND items were not read.
    """
    queue: asyncio.Queue[tuple[int, T] | _Failure | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            message = await queue.get()
            if message is None:
                running -= 1
            elif isinstance(message, _Failure):
                raise message.error
            else:
                yield message
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _pump(
    index: int,
    source: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | _Failure | None],
) -> None:
    """Moves one source's items into the queue, then None or how it failed."""
    try:
        async with aclosing(source):
            async for item in source:
                if queue.qsize() >= MAX_BEHIND:
                    raise Cancelled(
                        f"the client is {MAX_BEHIND} events behind", code="CLIENT_TOO_SLOW"
                    )
                queue.put_nowait((index, item))
        queue.put_nowait(None)
    except asyncio.CancelledError:
        # Perhaps the source's own: whoever waits for its items must not wait for ever.
        queue.put_nowait(_Failure(PdserveError("the generation was cancelled")))
        raise
    except Exception as error:
        queue.put_nowait(_Failure(error))
