"""How many requests are served at once, how many may wait, for how long, and whose turn it is."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256

from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.requests.fair_share import FairShare

MIN_PATIENCE = 0.1  # seconds from one look at whether a body proceeds to the next, at least
MAX_WAITING_TOKENS = 2**22  # prompt tokens in the queue; each takes four bytes


@dataclass(slots=True, eq=False)
class Batch:
    """The prompts of one body. They are admitted together, and each takes a slot of its own."""

    client: str = ""  # whose they are: an API key's name, or an address
    num_tokens: int = 0  # of all prompts
    admitted: bool = False
    running: int = 0  # prompts that have a slot
    left: float = -math.inf  # when one last gave its slot back (the event loop's clock)

    @property
    def alias(self) -> str:
        """The client's name for nodes, which need no more of it than that it differs."""
        return sha256(self.client.encode(errors="surrogateescape")).hexdigest()[:16]


class Admission:
    """A bounded queue in front of a bounded number of slots, fair between clients: one of them
    holds at most its share of either, and the next free slot is for the client with fewest."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        timeout: float,
        max_client_share: float = 1.0,
    ) -> None:
        self._slots = FairShare(max_running, max_client_share, overdraw=True)
        self._running = 0
        self._max_waiting = max_waiting
        self._max_client_share = max_client_share
        self._timeout = timeout
        self._waiting: Counter[str] = Counter()  # prompts
        self._waiting_tokens: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return self._waiting.total()

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
            Overloaded: the queue is full, or the client's share of it; only a batch's first
                prompt meets this: a body is admitted as a whole.
            Unavailable: no prompt of the batch has had a place for as long as one may wait.
        """
        batch = Batch(num_tokens=num_tokens) if batch is None else batch
        choices = min(choices, self._slots.client_limit)
        if not batch.admitted:
            self._check_room(batch, choices)
            batch.admitted = True
        with self._queued(batch.client, num_tokens):
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

    def _check_room(self, batch: Batch, choices: int) -> None:
        client = batch.client
        if self._slots.has_room(client, choices):
            return
        for waiting, new, limit, what in (
            (self._waiting, 1, self._max_waiting, "requests"),
            (self._waiting_tokens, batch.num_tokens, MAX_WAITING_TOKENS, "prompt tokens"),
        ):
            client_limit = math.ceil(limit * self._max_client_share)
            # A body may be larger than the client's share; of others it takes no more than that.
            total = sum(min(count, client_limit) for count in waiting.values())
            own = waiting[client]
            if own and own + new > client_limit:
                raise Overloaded(
                    f"{own} {what} of this client are waiting already", retry_after=1.0
                )
            if total + new > limit and (total or not limit):
                raise Overloaded(f"{total} {what} are waiting already", retry_after=1.0)

    @contextmanager
    def _queued(self, client: str, num_tokens: int) -> Iterator[None]:
        counters = ((self._waiting, 1), (self._waiting_tokens, num_tokens))
        for waiting, count in counters:
            waiting[client] += count
        try:
            yield
        finally:
            for waiting, count in counters:
                waiting[client] -= count
                if not waiting[client]:
                    del waiting[client]

    async def _acquire(self, batch: Batch, choices: int, priority: int) -> None:
        now = asyncio.get_running_loop().time
        until = now() + self._timeout
        while True:
            try:
                async with asyncio.timeout_at(until):
                    return await self._slots.acquire(batch.client, choices, priority)
            except TimeoutError:
                if batch.running:  # the body proceeds, prompt by prompt
                    until = now() + max(self._timeout, MIN_PATIENCE)
                elif (until := batch.left + self._timeout) <= now():
                    raise Unavailable(
                        f"no place came free within {self._timeout:g} s",
                        code="QUEUE_TIMEOUT",
                        retry_after=2.0,
                    ) from None
