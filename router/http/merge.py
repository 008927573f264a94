"""Several generations as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields (source's index, item) as items come. The first error of any source ends all.

    However it ends, all sources are closed when it has ended.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | _Failure | None] = asyncio.Queue(maxsize=len(sources))
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
                await queue.put((index, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(_Failure(error))
