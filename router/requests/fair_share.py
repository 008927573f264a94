"""A capacity that clients share: none of them holds all of it, and none waits behind another
one's queue."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pdserve.common.core.errors import Overloaded

T = TypeVar("T")


class Waiter(NamedTuple):
    priority: int  # lower ones come first
    amount: int
    future: asyncio.Future[None]  # resolved when it has it


class FairShare:
    """Max-min fair: what comes free goes to the waiting client that holds least, of equals to
    the one that was served longest ago. Within a client by priority, of equals first come first
    served.

    The queues are bounded by whoever calls `acquire`.
    """

    def __init__(
        self, capacity: int, max_client_share: float = 1.0, *, overdraw: bool = False
    ) -> None:
        """`overdraw`: a piece needs no more than the first unit of it to be free, so that none
        has to wait, and others behind it, until there is room for a large one."""
        self.capacity = capacity
        self._overdraw = overdraw
        self.client_limit = max(1, math.ceil(capacity * max_client_share))
        self.held = 0
        self._held_by: Counter[str] = Counter()
        self._queues: dict[str, deque[Waiter]] = {}  # the client served last is the last one

    @property
    def waiting(self) -> int:
        """Calls of `acquire` that wait."""
        return sum(map(self.waiting_of, self._queues))

    def waiting_of(self, client: str) -> int:
        return sum(not each.future.done() for each in self._queues.get(client, ()))

    def has_room(self, client: str, amount: int = 1) -> bool:
        """Whether `acquire` would return at once."""
        return not self._queues.get(client) and self._fits(client, amount)

    async def acquire(self, client: str, amount: int = 1, priority: int = 0) -> None:
        """Waits for `amount` of the capacity, which `release` returns. Cancelled, it holds
        nothing."""
        future = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(client, deque())
        ahead = len(queue)
        while ahead and queue[ahead - 1].priority > priority:
            ahead -= 1
        queue.insert(ahead, Waiter(priority, amount, future))
        self._grant()
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.release(client, amount)  # granted in the moment it was cancelled
            else:
                self._leave(client, future)
            raise

    def release(self, client: str, amount: int = 1) -> None:
        self.held -= amount
        self._held_by[client] -= amount
        if not self._held_by[client]:
            del self._held_by[client]
        self._grant()

    # ---- inside -----------------------------------------------------------------------------

    def _fits(self, client: str, amount: int) -> bool:
        """A client that holds nothing may exceed its limit with one single piece."""
        own = self._held_by[client]
        room = own == 0 or own + amount <= self.client_limit
        needed = 1 if self._overdraw else min(amount, self.capacity)
        return room and self.held + needed <= self.capacity

    def _grant(self) -> None:
        while (client := self._next()) is not None:
            _, amount, future = self._queues[client].popleft()
            self._queues[client] = self._queues.pop(client)  # behind the others
            self._drop_if_empty(client)
            self.held += amount
            self._held_by[client] += amount
            future.set_result(None)

    def _next(self) -> str | None:
        """The client whose turn it is. A large piece waits until it fits: smaller ones of other
        clients do not overtake it for ever."""
        for name in list(self._queues):
            self._forget_cancelled(name)
        turns = [
            client
            for client, queue in self._queues.items()
            if self._held_by[client] == 0
            or self._held_by[client] + queue[0].amount <= self.client_limit
        ]
        if not turns:
            return None
        client = min(turns, key=lambda name: self._held_by[name])
        return client if self._fits(client, self._queues[client][0].amount) else None

    def _leave(self, client: str, future: asyncio.Future[None]) -> None:
        if client in self._queues:
            queue = self._queues[client]
            self._queues[client] = deque(each for each in queue if each.future is not future)
        self._drop_if_empty(client)
        self._grant()  # it may have stood before others

    def _forget_cancelled(self, client: str) -> None:
        queue = self._queues[client]
        while queue and queue[0].future.done():  # its task has not run since
            queue.popleft()
        self._drop_if_empty(client)

    def _drop_if_empty(self, client: str) -> None:
        if not self._queues.get(client, True):
            del self._queues[client]


class Turns:
    """Work of which so many pieces are done at once, and so many may wait: clients take turns."""

    def __init__(self, size: int, max_waiting: int, max_client_waiting: int) -> None:
        self._free = FairShare(size)
        self._max_waiting = max_waiting
        self._max_client_waiting = max_client_waiting
        self._work: set[asyncio.Task[Any]] = set()

    async def run(self, client: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the outcome of the work. Cancelled, it does not begin; but it is not stopped
        halfway, and its place is free when it has ended.

        Raises:
            Overloaded: too much waits.
        """
        waiting, own = self._free.waiting, self._free.waiting_of(client)
        if waiting >= self._max_waiting or own >= self._max_client_waiting:
            raise Overloaded(f"{waiting} large bodies are waiting already", retry_after=1.0)
        await self._free.acquire(client)
        task = asyncio.create_task(work())
        self._work.add(task)
        task.add_done_callback(partial(self._done, client))
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _done(self, client: str, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        self._free.release(client)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone
