"""How many requests are served at once, how many may wait, for how long, and whose turn it is."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.requests.fair_share import FairShare, longest

MIN_PATIENCE = 0.1  # seconds from one look at whether a body proceeds to the next, at least
RESERVED = 1 / 8  # of the slots, for clients that hold none
MAX_WAITING_TOKENS = 2**22  # prompt tokens in the queue; each takes four bytes


@dataclass(slots=True, eq=False)
class Batch:
    """The prompts of one body. They are admitted together, and each takes a slot of its own."""

    client: str = ""  # whose they are: an API key's name, or an address
    num_tokens: int = 0  # of all prompts
    admitted: bool = False
    refused: bool = False  # after it was admitted, before it had a slot
    waiting: int = 0  # prompts that wait for a slot,
    waiting_tokens: int = 0  # and their tokens
    running: int = 0  # prompts that have a slot
    left: float = -math.inf  # when one last gave its slot back (the event loop's clock)

    @property
    def begun(self) -> bool:
        return bool(self.running) or self.left > -math.inf

    @property
    def alias(self) -> str:
        """The client's name for nodes, which need no more of it than that it differs."""
        return sha256(self.client.encode(errors="surrogateescape")).hexdigest()[:16]


Waiting = Mapping[str, dict[Batch, None]]
"""The batches of each client that have prompts in the queue; a client's newest is its last."""


class Line:
    """How much of one kind waits, by client, and how much may."""

    def __init__(self, what: str, limit: int, share: float, size: Callable[[Batch], int]) -> None:
        self.what = what
        self.counts: Counter[str] = Counter()
        self._limit = limit
        self._client_limit = math.ceil(limit * share)
        self._size = size

    def check_own(self, client: str, new: int) -> None:
        """Raises Overloaded: with `new` more the client would have more than its share."""
        own = self.counts[client]
        if own and own + new > self._client_limit:
            raise self.refusal(own, " of this client")

    def giving_way(self, client: str, new: int, waiting: Waiting, gone: list[Batch]) -> list[Batch]:
        """Returns the batches to refuse so that the client may wait with `new` more, when `gone`
        are refused already: those of the clients that have most, the newest first. Batches that
        have begun stay, and all stay when the client would have no more than an equal part.

        Raises:
            Overloaded: no other client has more than this one would have.
        """
        counts, found = self.counts.copy(), list[Batch]()
        for each in gone:
            counts[each.client] -= self._size(each)
        own, limit = counts[client] + new, self._limit
        while (total := self._total(counts)) + new > limit and (total or not limit):
            rivals = (waiting[name] for name in longest(counts, than=own) if name in waiting)
            batch = next((each for rival in rivals for each in _newest(rival, gone + found)), None)
            if batch is None:
                if own <= limit // len(counts | {client: 1}):
                    return []
                raise self.refusal(self._total(self.counts))
            found.append(batch)
            counts[batch.client] -= self._size(batch)
        return found

    def refusal(self, count: int | None = None, whose: str = "") -> Overloaded:
        count = self._total(self.counts) if count is None else count
        return Overloaded(f"{count} {self.what}{whose} are waiting already", retry_after=1.0)

    def _total(self, counts: Counter[str]) -> int:
        """A body may be larger than the client's share; of others it takes no more than that."""
        return sum(min(count, self._client_limit) for count in counts.values())


def _newest(batches: dict[Batch, None], gone: list[Batch]) -> Iterator[Batch]:
    return (each for each in reversed(batches) if not each.begun and each not in gone)


class Admission:
    """A bounded queue in front of a bounded number of slots, fair between clients: one of them
    holds at most its share of either, the next free slot is for the client with fewest, the last
    ones are for clients that hold none, and when the queue is full the client that has most of it
    gives way to one that has less."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        timeout: float,
        max_client_share: float = 1.0,
    ) -> None:
        self._slots = FairShare(max_running, max_client_share, overdraw=True, reserved=RESERVED)
        self._running = 0
        self._timeout = timeout
        self._waiting: defaultdict[str, dict[Batch, None]] = defaultdict(dict)
        share = max_client_share
        self._prompts = Line("requests", max_waiting, share, lambda each: each.waiting)
        self._tokens = Line(
            "prompt tokens", MAX_WAITING_TOKENS, share, lambda each: each.waiting_tokens
        )

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return self._prompts.counts.total()

    @property
    def places(self) -> int:
        """The choices that may run through this router now."""
        return self._slots.available

    def placed_by_others(self, choices: int, routers: int) -> None:
        """So many choices are served through other routers of the same nodes: their slots are
        taken, but for an equal part of all that each router keeps."""
        capacity = self._slots.capacity
        self._slots.held_elsewhere(min(choices, capacity - math.ceil(capacity / routers)))

    @asynccontextmanager
    async def slot(
        self,
        batch: Batch | None = None,
        num_tokens: int = 0,
        choices: int = 1,
        priority: int = 0,
    ) -> AsyncIterator[None]:
        """Holds a slot for each choice of one prompt, of `num_tokens`, of a batch, as far as the
        client's share goes: choices are what nodes compute. Of the client's prompts one of lower
        `priority` comes first.

        Raises:
            Overloaded: the queue is full, or the client's share of it; or it has become full, and
                the client has most of it. A batch meets this before its first prompt has a slot:
                a body is admitted as a whole.
            Unavailable: no prompt of the batch has had a place for as long as one may wait.
        """
        batch = Batch(num_tokens=num_tokens) if batch is None else batch
        choices = min(choices, self._slots.client_limit)
        if batch.refused:
            raise self._prompts.refusal()
        if not batch.admitted:
            self._make_room(batch, choices)
            batch.admitted = True
        with self._queued(batch, num_tokens):
            await self._acquire(batch, choices, priority)
        batch.running += 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            batch.running -= 1
            batch.left = asyncio.get_running_loop().time()
            self._slots.release(batch.client, choices)

    def _make_room(self, batch: Batch, choices: int) -> None:
        client, gone = batch.client, list[Batch]()
        if self._slots.has_room(client, choices):
            return
        lines = ((self._prompts, 1), (self._tokens, batch.num_tokens))
        for line, new in lines:
            line.check_own(client, new)
        refusal = self._prompts.refusal()
        for line, new in lines:
            if found := line.giving_way(client, new, self._waiting, gone):
                refusal = line.refusal()
                gone += found
        for each in gone:
            self._refuse(each, refusal)

    def _refuse(self, batch: Batch, refusal: Overloaded) -> None:
        self._count(batch, -batch.waiting, -batch.waiting_tokens)
        batch.refused = True
        error = partial(Overloaded, refusal.message, retry_after=refusal.retry_after)
        self._slots.refuse(batch.client, batch, error)

    @contextmanager
    def _queued(self, batch: Batch, num_tokens: int) -> Iterator[None]:
        self._count(batch, 1, num_tokens)
        try:
            yield
        finally:
            if not batch.refused:
                self._count(batch, -1, -num_tokens)

    def _count(self, batch: Batch, prompts: int, tokens: int) -> None:
        """So many more of the batch's wait."""
        client = batch.client
        batch.waiting += prompts
        batch.waiting_tokens += tokens
        for line, new in ((self._prompts, prompts), (self._tokens, tokens)):
            line.counts[client] += new
            if not line.counts[client]:
                del line.counts[client]
        if batch.waiting:
            self._waiting[client].setdefault(batch)
        else:
            self._waiting[client].pop(batch, None)
            if not self._waiting[client]:
                del self._waiting[client]

    async def _acquire(self, batch: Batch, choices: int, priority: int) -> None:
        now = asyncio.get_running_loop().time
        until = now() + self._timeout
        while True:
            try:
                async with asyncio.timeout_at(until):
                    return await self._slots.acquire(batch.client, choices, priority, batch)
            except TimeoutError:
                if batch.running:  # the body proceeds, prompt by prompt
                    until = now() + max(self._timeout, MIN_PATIENCE)
                elif (until := batch.left + self._timeout) <= now():
                    raise Unavailable(
                        f"no place came free within {self._timeout:g} s",
                        code="QUEUE_TIMEOUT",
                        retry_after=2.0,
                    ) from None
