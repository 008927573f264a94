"""A capacity that clients share: none holds all of it, none waits behind another's queue, and none
fills the queues of all."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pdserve.common.core.errors import Overloaded

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter:
    priority: int  # lower ones come first
    amount: int
    group: object  # those of one group are refused together
    future: asyncio.Future[None]  # resolved when it has it


def longest(waiting: Mapping[str, int], than: int) -> list[str]:
    """The clients that have more than this waiting, those with most first."""
    found = [client for client, count in waiting.items() if count > than]
    return sorted(found, key=lambda client: -waiting[client])


class FairShare:
    """Max-min fair: what comes free goes to the waiting client that holds least, of equals to
    the one that was served longest ago. Within a client by priority, of equals first come first
    served.

    The queues are bounded by whoever calls `acquire`: with `make_room`, or by a rule of its own
    and `refuse`. In full queues the longest one gives way (longest queue drop, Suter et al.,
    INFOCOM 1998): whoever fills them loses its own newest ones to others.
    """

    def __init__(
        self,
        capacity: int,
        max_client_share: float = 1.0,
        *,
        overdraw: bool = False,
        reserved: float = 0.0,
    ) -> None:
        """`overdraw`: a piece needs no more than the first unit of it to be free, so that none
        has to wait, and others behind it, until there is room for a large one. `reserved`: a share
        of the capacity for clients that hold nothing, as far as one client alone cannot have it;
        without it several that hold much would leave a newcomer to wait for what they give back."""
        self.capacity = capacity
        self._overdraw = overdraw
        self.client_limit = max(1, math.ceil(capacity * max_client_share))
        self._reserved = max(0, min(int(capacity * reserved), capacity - self.client_limit))
        self.held = 0
        self._elsewhere = 0
        self._held_by: Counter[str] = Counter()
        self._queues: dict[str, deque[Waiter]] = {}  # the client served last is the last one
        self._lengths: Counter[str] = Counter()  # of the queues

    @property
    def waiting(self) -> int:
        """Calls of `acquire` that wait."""
        return self._lengths.total()

    def has_room(self, client: str, amount: int = 1) -> bool:
        """Whether `acquire` would return at once."""
        return not self._queues.get(client) and self._fits(client, amount)

    @property
    def available(self) -> int:
        """The capacity that is to be had here, held or free."""
        return self.capacity - self._elsewhere

    def held_elsewhere(self, amount: int) -> None:
        """So much of the capacity is not to be had here for now."""
        self._elsewhere = amount
        self._grant()

    def make_room(self, client: str, most: int, what: str) -> None:
        """Lets one more of the client's wait, though at most so many do: the client that has most
        waiting gives way, and its newest one is refused.

        Raises:
            Overloaded: no client has more than this one would have.
        """
        if self.waiting < most or self.has_room(client):
            return
        error = partial(Overloaded, f"{self.waiting} {what} are waiting already", retry_after=1.0)
        if not (names := longest(self._lengths, than=self._lengths[client] + 1)):
            raise error()
        self._refuse(names[0], [self._queues[names[0]][-1]], error)

    async def acquire(
        self, client: str, amount: int = 1, priority: int = 0, group: object = None
    ) -> None:
        """Waits for `amount` of the capacity, which `release` returns. Cancelled, it holds
        nothing.

        Raises:
            Overloaded: it was refused while it waited.
        """
        future = asyncio.get_running_loop().create_future()
        waiter = Waiter(priority, amount, group, future)
        queue = self._queues.setdefault(client, deque())
        ahead = len(queue)
        while ahead and queue[ahead - 1].priority > priority:
            ahead -= 1
        queue.insert(ahead, waiter)
        self._lengths[client] += 1
        self._grant()
        try:
            await future
        except BaseException:
            if future.cancelled():
                self._leave(client, waiter)
            elif future.exception() is None:
                self.release(client, amount)  # granted in the moment it was cancelled
            raise

    def refuse(self, client: str, group: object, error: Callable[[], Overloaded]) -> None:
        """Ends the client's waiting calls of this group with the error."""
        found = [each for each in self._queues.get(client, ()) if each.group is group]
        self._refuse(client, found, error)

    def release(self, client: str, amount: int = 1) -> None:
        self.held -= amount
        self._held_by[client] -= amount
        if not self._held_by[client]:
            del self._held_by[client]
        self._grant()

    # ---- inside ------------------------------------------------------------------------------

    def _fits(self, client: str, amount: int) -> bool:
        """A client that holds nothing may exceed its limit with one single piece."""
        own = self._held_by[client]
        room = own == 0 or own + amount <= self.client_limit
        needed = 1 if self._overdraw else min(amount, self.capacity)
        capacity = self.available - (self._reserved if own else 0)
        return room and self.held + needed <= capacity

    def _grant(self) -> None:
        while (client := self._next()) is not None:
            waiter = self._queues[client][0]
            self._queues[client] = self._queues.pop(client)  # behind the others
            self._remove(client, waiter)
            self.held += waiter.amount
            self._held_by[client] += waiter.amount
            waiter.future.set_result(None)

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

    def _leave(self, client: str, waiter: Waiter) -> None:
        if waiter in self._queues.get(client, ()):
            self._remove(client, waiter)
        self._grant()  # it may have stood before others

    def _refuse(
        self, client: str, waiters: Iterable[Waiter], error: Callable[[], Overloaded]
    ) -> None:
        for waiter in waiters:
            self._remove(client, waiter)
            if not waiter.future.done():
                waiter.future.set_exception(error())
        self._grant()

    def _forget_cancelled(self, client: str) -> None:
        while (queue := self._queues.get(client)) and queue[0].future.done():
            self._remove(client, queue[0])  # its task has not run since

    def _remove(self, client: str, waiter: Waiter) -> None:
        queue = self._queues[client]
        queue.remove(waiter)
        self._lengths[client] -= 1
        if not queue:
            del self._queues[client], self._lengths[client]


class FairExecutor:
    """Work of which so many pieces are done at once, and so many may wait: clients take turns."""

    def __init__(self, size: int, max_waiting: int) -> None:
        self._free = FairShare(size)
        self._max_waiting = max_waiting
        self._work: set[asyncio.Task[Any]] = set()

    async def run(self, client: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the outcome of the work. Cancelled, it does not begin; but it is not stopped
        halfway, and its place is free when it has ended.

        Raises:
            Overloaded: too much waits.
        """
        self._free.make_room(client, self._max_waiting, "large bodies")
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
