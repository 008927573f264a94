"""The requests of the HTTP and gRPC services to the pipeline, and the updates that it yields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import msgspec

from pdserve.common.core.errors import Cancelled, PdserveError
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.router.cluster.adapters import Adapter
from pdserve.router.cluster.claims import AnswerKey
from pdserve.router.cluster.role_policy import Chosen
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.stages import Stages
from pdserve.router.requests.unread import Unread

MAX_BURST = 32  # generations that begin, or are cancelled, per turn of the event loop
# Generations of one body that have begun and not ended: each is a hundred objects, and those that
# wait for a slot would make every look of the garbage collector long.
MAX_BEGUN = 512
# Items a client may be behind with, each of a few hundred bytes; who is further behind is given up.
MAX_BEHIND = 16 * 1024
COUNTED = 64  # updates of a queue that are added to `Unread` together
UPDATE_NBYTES, TOP_NBYTES = 384, 128  # of a delta with its token, and of each alternative, about
# Deltas that become one chunk of an answer, and characters of one that is long enough alone.
MAX_JOINED, MAX_JOINED_TEXT = 64, 1024


@dataclass(frozen=True, slots=True)
class Past:
    """Some tokens of a choice that the client has, from another router."""

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    version: str  # as `TextDelta.version`


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
    # The client wants no token, only the prompt's log-probabilities, which come with the first one.
    prompt_only: bool = False
    before: Sequence[int] = ()  # tokens whose text the client sees in front of the answer's
    past: tuple[Past, ...] = ()  # what the client has already, in order
    constraint: str = ""  # the client's field with its grammar, for errors
    key: AnswerKey | None = None  # of an answer that is made once, through whichever routers


class TextDelta(msgspec.Struct, frozen=True):
    """The news of one choice. The last delta of a choice carries `finish_reason`."""

    choice: int
    text: str  # whole characters, no part of a stop string
    tokens: tuple[SampledToken, ...]  # the tokens drawn, whether or not their text is out yet
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id in stop_token_ids
    version: str = ""  # fingerprint of the node that made it


@dataclass(frozen=True, slots=True)
class Replayed:
    """The delta of a `Past`: all of them bring a writer to where the client is."""

    delta: TextDelta


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The last thing a generation yields."""

    prompt_tokens: int
    completion_tokens: int  # over all choices
    cached_tokens: int
    timeline: Timeline
    stages: Stages = field(default_factory=Stages, compare=False)
    finish_reasons: tuple[FinishReason, ...] = ()  # of the choices that have ended
    num_choices: int = 1
    chosen: tuple[Chosen, ...] = ()  # its last nodes

    def receipt(self, end: float | None = None) -> Timeline:
        """Returns the timeline with all stages until `end` (monotonic), or until now, when it is
        written."""
        end = monotonic() if end is None else end
        total = end - self.stages.start
        return replace(self.timeline, total_seconds=total, stages=self.stages.stages(end))


Update = PromptLogprobs | Replayed | TextDelta | GenerationStats
"""A generation yields these: first what is wanted of its prompt, or what is replayed, if anything
is."""


Updates = list[tuple[int, Update]]
"""Updates of one turn: (the prompt's index, its update), in order."""

Put = Callable[[Update], None]
Serve = Callable[[GenerationRequest, Put], Coroutine[Any, Any, GenerationStats]]
"""Serves one prompt: puts its updates into the queue, and returns the last one."""


Write = Callable[[Updates], bool]
"""Writes updates to a client; returns False if the client's own task must write them."""


class Turn:
    """The queues that got deltas in this turn of the event loop: in the next one, each of them is
    written once."""

    def __init__(self) -> None:
        self._queues: list[UpdateQueue] = []
        self._context = Context()  # no request's

    def add(self, queue: UpdateQueue) -> None:
        if not self._queues:
            asyncio.get_running_loop().call_soon(self._write, context=self._context)
        self._queues.append(queue)

    def _write(self) -> None:
        queues, self._queues = self._queues, []
        for queue in queues:
            queue.write()


class Outlet:
    """Where a client's deltas go, once `write` is set, without waking its task for each step."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.write: Write | None = None


class UpdateQueue:
    """The unread updates of one client, of all its prompts. The prompts' tasks put them in. While
    the client's task waits for more, deltas go through its outlet. It takes everything else, and
    what the outlet does not write, all at once. Unread updates count towards `unread`, the total of
    all clients; a queue that lost its updates to others takes nothing more."""

    def __init__(
        self, outlet: Outlet | None = None, unread: Unread | None = None, client: str = ""
    ) -> None:
        self._outlet = outlet
        self._unread = unread
        self._client = client
        self._is_counted = False
        self._gave_way: Cancelled | None = None
        self._updates: Updates = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = 0  # prompts that have put their last update

    @property
    def has_news(self) -> bool:
        """Whether `take` would return or raise without waiting."""
        return bool(self._updates) or self._failure is not None

    def put(self, prompt: int, update: Update) -> None:
        """Raises Cancelled: the client has not read MAX_BEHIND updates, or gave way. It hears of
        that, too, whatever becomes of the prompt."""
        if isinstance(update, GenerationStats):
            self.ended += 1
        elif self._gave_way is not None:
            raise self._gave_way
        elif len(self._updates) >= MAX_BEHIND:
            error = Cancelled(f"the client is {MAX_BEHIND} events behind", code="CLIENT_TOO_SLOW")
            self.fail(error)
            raise error
        if self._failure is None:
            self._updates.append((prompt, update))
            if not len(self._updates) % COUNTED:
                self._count()
            outlet = self._outlet
            if outlet is None or outlet.write is None or not isinstance(update, TextDelta):
                self._wake()
            elif len(self._updates) == 1:
                outlet.turn.add(self)

    def write(self) -> None:
        """Writes the pending deltas through the outlet, unless the client's task is about to."""
        assert self._outlet is not None and self._outlet.write is not None, "it was added"
        if self._waiter is None or self._waiter.done():
            return
        try:
            if self._outlet.write(self._updates):
                self._taken()
            else:
                self._wake()
        except Exception as error:
            self._taken()
            self.fail(error)

    def give_way(self, error: Cancelled) -> None:
        """Drops unread and later updates."""
        self._gave_way = error
        self._updates, self._is_counted = [], False
        self.fail(error)

    def close(self) -> None:
        """Ends the counting: the client reads no more updates."""
        self._taken()

    def _taken(self) -> Updates:
        updates, self._updates = self._updates, []
        if self._is_counted and self._unread is not None:
            self._is_counted = False
            self._unread.emptied(self._client, self)
        return updates

    def _count(self) -> None:
        """Adds the newest updates to `Unread`."""
        if self._unread is not None:
            self._is_counted = True
            nbytes = sum(_nbytes(update) for _, update in self._updates[-COUNTED:])
            self._unread.grown(self._client, self, nbytes)

    def fail(self, error: Exception) -> None:
        """Notes that a prompt failed; the first of several failures counts."""
        self._failure = self._failure or error
        self._wake()

    async def take(self) -> Updates:
        """Returns one update at least; raises the failure when all that came before is taken."""
        while not self._updates:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._taken()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nbytes(update: Update) -> int:
    if not isinstance(update, TextDelta):
        return UPDATE_NBYTES
    tops = sum(len(each.logprobs.top) for each in update.tokens if each.logprobs is not None)
    return UPDATE_NBYTES + TOP_NBYTES * tops


async def generate(
    requests: Sequence[GenerationRequest],
    serve: Serve,
    outlet: Outlet | None = None,
    unread: Unread | None = None,
) -> AsyncGenerator[Updates, None]:
    """Serves the prompts of one client, each in its own task, and yields the updates that were not
    written through the outlet. A slow client does not hold a slot on the nodes: prompts go on while
    it does not read. They begin in order, MAX_BEGUN at once; the first error ends all. All tasks
    have ended when this ends.

    Raises:
        Cancelled: more than MAX_BEHIND updates were not read, or too many of all clients, of which
            this one had most.
    """
    client = requests[0].batch.client if requests else ""
    queue, tasks = UpdateQueue(outlet, unread, client), list[asyncio.Task[None]]()
    to_begin = iter(enumerate(requests))
    try:
        while queue.has_news or queue.ended < len(requests):
            left = len(requests) - len(tasks)
            if room := min(left, MAX_BURST, MAX_BEGUN - (len(tasks) - queue.ended)):
                burst = islice(to_begin, room)
                tasks += [asyncio.create_task(_serve(serve, i, each, queue)) for i, each in burst]
                await asyncio.sleep(0)
                if not queue.has_news:
                    continue
            yield await queue.take()
    finally:
        queue.close()
        await _end(tasks)


async def _serve(serve: Serve, prompt: int, request: GenerationRequest, queue: UpdateQueue) -> None:
    """Serves one prompt, as its task; puts its outcome into the queue."""
    try:
        queue.put(prompt, await serve(request, partial(queue.put, prompt)))
    except asyncio.CancelledError:
        # Perhaps only this task is cancelled: the reader of the queue must not wait forever.
        queue.fail(PdserveError("the generation was cancelled"))
        raise
    except Exception as error:
        queue.fail(error)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    left = iter(tasks)
    try:
        while burst := list(islice(left, MAX_BURST)):
            for task in burst:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:  # cancelled once more
        for task in left:
            task.cancel()


def coalesced(updates: Updates) -> Updates:
    """Returns the updates with fewer deltas, for a client that is slower than the nodes: deltas of
    a choice are joined, up to the size of one message."""
    if len(updates) == 1:
        return updates
    parts: list[tuple[int, list[TextDelta]]] = []
    growing: dict[tuple[int, int], list[TextDelta]] = {}
    prompts: Updates = []
    rest: Updates = []
    for index, update in updates:
        if not isinstance(update, TextDelta):
            first = isinstance(update, PromptLogprobs | Replayed)
            (prompts if first else rest).append((index, update))
            continue
        part = growing.get((index, update.choice), [])
        if not part or len(part) == MAX_JOINED or len(part[-1].text) > MAX_JOINED_TEXT:
            part = growing[index, update.choice] = []
            parts.append((index, part))
        part.append(update)
    return [*prompts, *((index, join(part)) for index, part in parts), *rest]


def join(deltas: Sequence[TextDelta]) -> TextDelta:
    """Joins consecutive deltas of one choice into one."""
    if len(deltas) == 1:
        return deltas[0]
    return TextDelta(
        choice=deltas[0].choice,
        text="".join([delta.text for delta in deltas]),
        tokens=tuple([token for delta in deltas for token in delta.tokens]),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        version=deltas[-1].version,
    )
