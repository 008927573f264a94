"""A capacity that clients share: no client holds all of it, waits behind another's queue, or fills
everyone's queues."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pdserve.common.core.errors import Overloaded
from pdserve.router.requests.virtual_time import VirtualTime

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """One waiting piece of work. `tell` is called once: with None (granted), or an error. It must
    not hold the waiter: a cycle of references would keep a request until garbage collection."""

    tell: Callable[[Overloaded | None], None] = lambda _: None
    has_left: Callable[[], bool] = lambda: False  # has stopped waiting without calling `leave` yet
    amount: int = 1
    tokens: int = 1
    priority: int = 0  # lower ones come first
    group: object = None  # pieces of one group are refused together
    overtaken: int = 0  # tokens of shorter, later pieces put before it

    def last_word(self) -> Overloaded | None:
        """Returns the refusal at its turn, if any."""
        return None

    def decided(self, error: Overloaded | None) -> None:
        """Called once, when it is granted or refused."""
        self.tell(error)

    def lets_pass(self, other: Waiter) -> bool:
        """Returns whether `other`, which came later, goes first: by priority, or because it is
        shorter and the tokens that have passed this piece do not exceed its own."""
        if self.priority != other.priority:
            return self.priority > other.priority
        return other.tokens < self.tokens and self.overtaken + other.tokens <= self.tokens


class Ahead(NamedTuple):
    """Returns the work that is served before a new piece, unless more comes later."""

    tokens: int = 0
    amount: int = 0


def longest(waiting: Mapping[str, int], than: int) -> list[str]:
    """Returns the clients with more waiting work than this, the most first."""
    found = [client for client, count in waiting.items() if count > than]
    return sorted(found, key=lambda client: -waiting[client])


class FairShare:
    """Gives free capacity to one client after the other: max-min fair, to the client that holds
    least, and among equals to the one served longest ago; or, with a `VirtualTime`, to the client
    with the fewest served tokens for its weight. Within a client the order is priority, then first
    come, first served, but shorter pieces pass a longer one as far as `Waiter.lets_pass`.

    The caller of `enter` bounds the queues: with `make_room`, or with its own rule and `refuse`.
    When the queues are full, the longest one loses its newest pieces (longest queue drop, Suter et
    al., INFOCOM 1998).

    Pure except for `acquire`, which waits on the event loop.
    """

    def __init__(
        self,
        capacity: int,
        max_client_share: float = 1.0,
        *,
        overdraw: bool = False,
        reserved: float = 0.0,
        time: VirtualTime | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`overdraw`: a piece needs only its first unit to be free, so that a large one does not
        wait, with others behind it, for all of its units. `reserved`: a share of the capacity for
        clients that hold nothing, if one client alone cannot have it; without it several clients
        that hold much would keep a newcomer waiting. `has_room`: whether any capacity may be given
        now; call `grant` when that changes."""
        self.capacity = capacity
        self._overdraw = overdraw
        self.client_limit = max(1, math.ceil(capacity * max_client_share))
        self._reserved = max(0, min(int(capacity * reserved), capacity - self.client_limit))
        self.time = time
        self.held = 0
        self._elsewhere = 0
        self._most = float(capacity)
        self._has_room = has_room
        self._held_by: Counter[str] = Counter()
        self._queues: dict[str, list[Waiter]] = {}  # the client served last comes last
        self._lengths: Counter[str] = Counter()  # of the queues

    @property
    def waiting(self) -> int:
        """The number of calls of `acquire` that wait."""
        return self._lengths.total()

    def has_room(self, client: str, amount: int = 1) -> bool:
        """Returns whether `acquire` would return without waiting."""
        return not self._queues.get(client) and self._fits(client, amount) and self._has_room()

    @property
    def available(self) -> int:
        """Returns the capacity available here, held or free."""
        return int(min(self.capacity - self._elsewhere, self._most))

    def held_elsewhere(self, amount: int) -> None:
        """Sets the capacity that is not available here for now."""
        self._elsewhere = amount
        self.grant()

    def bound(self, most: float) -> None:
        """Limits the available capacity for now."""
        self._most = most
        self.grant()

    def ahead(self, client: str, waiter: Waiter) -> Ahead:
        """Returns the work served before a new piece: the pieces before it in the client's queue,
        and those of other clients that start until then."""
        own = self._queues.get(client, [])
        own = own[: self._place(own, waiter)]
        before = sum(each.tokens for each in own)
        tokens, amount = before, sum(each.amount for each in own)
        if self.time is None:
            return Ahead(tokens, amount)
        start = self.time.start(client) + before / self.time.weight(client)
        for name, queue in self._queues.items():
            if name != client:
                left = (start - self.time.start(name)) * self.time.weight(name)
                for each in queue:
                    if left < 0:
                        break
                    left -= each.tokens
                    tokens, amount = tokens + each.tokens, amount + each.amount
        return Ahead(tokens, amount)

    def make_room(self, client: str, most: int, what: str) -> None:
        """Makes room for one more waiting piece of the client, within the limit of all: the newest
        piece of the client with the longest queue is refused.

        Raises:
            Overloaded: no client has more than this one would have.
        """
        if self.waiting < most or self.has_room(client):
            return
        error = partial(Overloaded, f"{self.waiting} {what} are waiting already", retry_after=1.0)
        if not (names := longest(self._lengths, than=self._lengths[client] + 1)):
            raise error()
        self._refuse(names[0], [self._queues[names[0]][-1]], error)

    def enter(self, client: str, waiter: Waiter) -> None:
        """Queues the piece; it may get its capacity at once."""
        queue = self._queues.setdefault(client, [])
        place = self._place(queue, waiter)
        for passed in queue[place:]:
            passed.overtaken += waiter.tokens if passed.priority == waiter.priority else 0
        queue.insert(place, waiter)
        self._lengths[client] += 1
        self.grant()

    def leave(self, client: str, waiter: Waiter) -> None:
        """Removes a piece from the queue."""
        if waiter in self._queues.get(client, ()):
            self._remove(client, waiter)
        self.grant()  # it may have blocked others

    async def acquire(
        self,
        client: str,
        amount: int = 1,
        tokens: int = 1,
        priority: int = 0,
        group: object = None,
    ) -> None:
        """Waits for `amount` of the capacity, which `release` returns. Cancelled, it holds
        nothing.

        Raises:
            Overloaded: it was refused while it waited.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(
            tell=partial(resolve, future),
            has_left=future.done,
            amount=amount,
            tokens=tokens,
            priority=priority,
            group=group,
        )
        self.enter(client, waiter)
        try:
            await future
        except BaseException:
            if future.cancelled():
                self.leave(client, waiter)
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
        self.grant()

    def grant(self) -> None:
        """Gives free capacity to the clients next in turn."""
        while (client := self._next()) is not None:
            waiter = self._queues[client][0]
            self._queues[client] = self._queues.pop(client)  # behind the others
            self._remove(client, waiter)
            if (error := waiter.last_word()) is not None:
                waiter.decided(error)
                continue
            self.held += waiter.amount
            self._held_by[client] += waiter.amount
            if self.time is not None:
                self.time.serve(client, waiter.tokens)
            waiter.decided(None)

    # ---- inside ------------------------------------------------------------------------------

    @staticmethod
    def _place(queue: list[Waiter], waiter: Waiter) -> int:
        """Returns its index in the client's queue."""
        place = len(queue)
        while place and queue[place - 1].lets_pass(waiter):
            place -= 1
        return place

    def _fits(self, client: str, amount: int) -> bool:
        needed = 1 if self._overdraw else min(amount, self.capacity)
        return self._may_hold(client, amount) and self.held + needed <= self._open_to(client)

    def _may_hold(self, client: str, amount: int) -> bool:
        """Returns whether it fits the client's limit, or the client holds nothing: a single large
        request may exceed the limit."""
        own = self._held_by[client]
        return own == 0 or own + amount <= self.client_limit

    def _open_to(self, client: str) -> int:
        reserved = self._reserved * self.available // self.capacity if self._held_by[client] else 0
        return self.available - reserved

    def _next(self) -> str | None:
        """Returns the client next in turn. A large piece waits until it fits: smaller ones of other
        clients do not overtake it forever."""
        for name in list(self._queues):
            self._forget_left(name)
        turns = [
            client
            for client, queue in self._queues.items()
            if self._may_hold(client, queue[0].amount) and self.held < self._open_to(client)
        ]
        if not turns or not self._has_room():
            return None
        client = min(turns, key=self._held_by.__getitem__ if self.time is None else self.time.start)
        return client if self._fits(client, self._queues[client][0].amount) else None

    def _refuse(
        self, client: str, waiters: Iterable[Waiter], error: Callable[[], Overloaded]
    ) -> None:
        for waiter in waiters:
            self._remove(client, waiter)
            if not waiter.has_left():
                waiter.decided(error())
        self.grant()

    def _forget_left(self, client: str) -> None:
        while (queue := self._queues.get(client)) and queue[0].has_left():
            self._remove(client, queue[0])  # its task has not run since

    def _remove(self, client: str, waiter: Waiter) -> None:
        queue = self._queues[client]
        queue.remove(waiter)
        self._lengths[client] -= 1
        if not queue:
            del self._queues[client], self._lengths[client]


def resolve(future: asyncio.Future[None], error: Overloaded | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class FairExecutor:
    """Runs a bounded number of pieces of work, with a bounded queue; clients take turns."""

    def __init__(self, size: int, max_waiting: int) -> None:
        self._free = FairShare(size)
        self._max_waiting = max_waiting
        self._work: set[asyncio.Task[Any]] = set()

    async def run(self, client: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the outcome of the work. Cancelled, it does not begin; but it is not stopped
        halfway, and its slot is free when it has ended.

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
            task.exception()  # retrieved here: the caller may have left
