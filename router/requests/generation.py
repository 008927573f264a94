"""The requests that the HTTP and gRPC services make of the pipeline, and what it yields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic
from typing import Generic, TypeVar

from pdserve.common.core.errors import Cancelled, PdserveError
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.router.cluster.adapters import Adapter
from pdserve.router.requests.admission import Batch
from pdserve.router.requests.stages import Stages

T = TypeVar("T")

MAX_BURST = 32  # generations that begin, or are given up, in one turn of the event loop
# Generations of one body that have begun and not ended: each is a hundred objects, and those that
# wait for a place would make every look of the garbage collector long.
MAX_BEGUN = 512
# Items a client may be behind with, each of a few hundred bytes; who is further behind is given up.
MAX_BEHIND = 16 * 1024
# Deltas that become one chunk of an answer, and characters of one that is long enough alone.
MAX_JOINED, MAX_JOINED_TEXT = 64, 1024


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
    priority: int = 0  # lower ones are served first
    cache_salt: str = ""  # requests with different salts share no cached blocks
    adapter: Adapter | None = None  # the LoRA adapter that computes it
    batch: Batch = field(default_factory=Batch, compare=False)  # the body it is part of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The news of one choice. The last delta of a choice carries `finish_reason`."""

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
    stages: Stages = field(default_factory=Stages, compare=False)

    def receipt(self, end: float | None = None) -> Timeline:
        """The timeline with all stages until `end` (monotonic), or until now, when it is
        written."""
        end = monotonic() if end is None else end
        total = end - self.stages.start
        return replace(self.timeline, total_seconds=total, stages=self.stages.stages(end))


Update = PromptLogprobs | TextDelta | GenerationStats
"""A generation yields these: first what is wanted of its prompt, if anything is."""


class Mailbox(Generic[T]):
    """One task puts items in, another takes all that are there at once: however many they are, it
    is woken once."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """One item at least; a single task may wait at a time."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


Updates = list[tuple[int, T]]  # (source's index, item), in order


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[Updates[T], None]:
    """Generations as one stream: yields what has come since the last time. They are made at
    their own pace: a client that reads slowly, or not at all, holds no slot on the nodes. They
    begin in order, MAX_BEGUN of them at once. The first error of any source ends all.

    A source ends when it has given its last item, whether or not that has been read. However
    this ends, all sources that have begun are closed when it has ended.

    Raises:
        Cancelled: more than MAX_BEHIND items were not read.
    """
    box: Mailbox[tuple[int, T] | Exception | None] = Mailbox()
    pumps: list[asyncio.Task[None]] = []
    to_begin = iter(enumerate(sources))
    try:
        ended = 0
        while ended < len(sources):
            room = min(MAX_BURST, MAX_BEGUN - (len(pumps) - ended))
            if burst := list(islice(to_begin, room)):
                pumps += [asyncio.create_task(_pump(i, source, box)) for i, source in burst]
                await asyncio.sleep(0)
                if not len(box):
                    continue
            updates: Updates[T] = []
            failure: Exception | None = None
            for message in await box.take():
                if message is None:
                    ended += 1
                elif isinstance(message, Exception):
                    failure = failure or message
                elif failure is None:
                    updates.append(message)
            if updates:
                yield updates
            if failure is not None:
                raise failure
    finally:
        await _end(pumps)


async def _end(pumps: Sequence[asyncio.Task[None]]) -> None:
    left = iter(pumps)
    try:
        while burst := list(islice(left, MAX_BURST)):
            for pump in burst:
                pump.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*pumps, return_exceptions=True)
    finally:  # cancelled once more
        for pump in left:
            pump.cancel()


async def _pump(
    index: int,
    source: AsyncGenerator[T, None],
    box: Mailbox[tuple[int, T] | Exception | None],
) -> None:
    """Moves one source's items into the box, then None or how it failed."""
    try:
        async with aclosing(source):
            async for item in source:
                if len(box) >= MAX_BEHIND:
                    raise Cancelled(
                        f"the client is {MAX_BEHIND} events behind", code="CLIENT_TOO_SLOW"
                    )
                box.put((index, item))
        box.put(None)
    except asyncio.CancelledError:
        # Perhaps the source's own: whoever waits for its items must not wait for ever.
        box.put(PdserveError("the generation was cancelled"))
        raise
    except Exception as error:
        box.put(error)


async def prompt_only(
    source: AsyncGenerator[Update, None],
) -> AsyncGenerator[Update, None]:
    """A generation of one token as what a client gets that wants none: what is computed of the
    prompt comes with the first token."""
    async with aclosing(source):
        async for update in source:
            if isinstance(update, GenerationStats):
                yield replace(update, completion_tokens=0)
            elif isinstance(update, PromptLogprobs):
                yield update
            elif update.finish_reason is not None:
                yield TextDelta(update.choice, "", (), FinishReason.LENGTH)


def coalesced(updates: Updates[Update]) -> Updates[Update]:
    """The same with fewer deltas, where the client is slower than the nodes: those of a choice
    are joined, as far as one message should go."""
    if len(updates) == 1:
        return updates
    parts: list[tuple[int, list[TextDelta]]] = []
    growing: dict[tuple[int, int], list[TextDelta]] = {}
    prompts: Updates[Update] = []
    rest: Updates[Update] = []
    for index, update in updates:
        if not isinstance(update, TextDelta):
            (prompts if isinstance(update, PromptLogprobs) else rest).append((index, update))
            continue
        part = growing.get((index, update.choice), [])
        if not part or len(part) == MAX_JOINED or len(part[-1].text) > MAX_JOINED_TEXT:
            part = growing[index, update.choice] = []
            parts.append((index, part))
        part.append(update)
    return [*prompts, *((index, join(part)) for index, part in parts), *rest]


def join(deltas: Sequence[TextDelta]) -> TextDelta:
    """All of one choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return TextDelta(
        choice=deltas[0].choice,
        text="".join([delta.text for delta in deltas]),
        tokens=tuple([token for delta in deltas for token in delta.tokens]),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
