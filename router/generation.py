"""What the HTTP and gRPC services ask of the pipeline, and what it yields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from pdserve.common.core.errors import Cancelled, PdserveError
from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.router.admission import Batch

T = TypeVar("T")

# Items a client may be behind with, each of a few hundred bytes; who is further behind is given up.
MAX_BEHIND = 16 * 1024


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its `n` choices; validated, so it fits the model and its window."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""  # requests with different salts share no cached blocks
    batch: Batch = field(default_factory=Batch, compare=False)  # the body it is part of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in one choice. The last delta of a choice carries `finish_reason`."""

    choice: int
    text: str  # whole characters, no part of a stop string
    tokens: tuple[SampledToken, ...]  # the tokens drawn, whether or not their text is out yet
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id in stop_token_ids


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The last thing a generation yields."""

    prompt_tokens: int
    completion_tokens: int  # over all choices
    cached_tokens: int
    timeline: Timeline


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Generations as one stream: yields (source's index, item) as items come. They are made at
    their own pace: a client that reads slowly, or not at all, holds no slot on the nodes. The
    first error of any source ends all.

    A source ends when it has given its last item, whether or not that has been read. However
    this ends, all sources are closed when it has ended.

    Raises:
        Cancelled: more than MAX_BEHIND items were not read.
    """
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            message = await queue.get()
            if message is None:
                running -= 1
            elif isinstance(message, Exception):
                raise message
            else:
                yield message
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    source: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
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
        queue.put_nowait(PdserveError("the generation was cancelled"))
        raise
    except Exception as error:
        queue.put_nowait(error)
