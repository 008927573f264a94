"""How long a request may take, and how it continues after a node failed: on another node, on one
node, or not at all."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from pdserve.common.core.errors import (
    Blame,
    DeadlineExceeded,
    NodeError,
    PdserveError,
    RequestError,
    TransferError,
)
from pdserve.router.cluster.failures import Effect, has
from pdserve.router.cluster.node import Node

TRANSFER_FAILURES = 2  # failed transfers after which the decode node prefills
WAITING = 0.125  # weight of a death while the request only waited on the node
# Roles that do the same work; their deaths count together.
ALIKE = {
    "prefill": ("prefill", "both"),
    "decode": ("decode", "both"),
    "both": ("prefill", "decode", "both"),
}
# By the role that made a token: where the request cannot be poison any more, had it failed there.
BEHIND = {**ALIKE, "prefill": ("prefill",)}
ALONE = 5.0  # seconds that a request waits for a node to itself, doubled after each shared death
SLACK = 1.0  # most seconds by which a request's time limit may be late
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds; the first failure is followed by none


class Deadline:
    """Two bounds, both moved by progress alone, never by another try.

    Waiting (for a slot, for nodes, between tries) may take `queue_timeout` seconds in all
    until the first token; from then on `request_timeout`, anew after every token, for a node
    that comes back is worth more to a half-read answer than an error. While nodes work on the
    request, `request_timeout` seconds may pass without progress (0: any time).
    """

    def __init__(self, queue_timeout: float, request_timeout: float) -> None:
        self._made = self.moved = monotonic()  # `moved`: the time of the last progress
        self.waits_for = ""  # what, while no node works on the request
        self._until: float | None = None  # the end (monotonic) of that wait
        self._request_timeout = request_timeout or None
        self._patience = queue_timeout  # seconds it may still wait
        self._limit: asyncio.Timeout | None = None
        self._late_enough = 0.0  # `progress` before that need not move the limit

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Bounds its body; the time before it was spent waiting for a slot.

        Raises:
            DeadlineExceeded: there was no progress for too long.
        """
        waited = monotonic() - self._made
        if waited < self._patience:  # else it is a body's later prompt: its time begins here
            self._patience -= waited
        self.waits_for, self._until = "", None
        limit = asyncio.timeout(self._request_timeout)
        try:
            async with limit as self._limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the request made no progress for {self._request_timeout:g} s"
            ) from None
        finally:
            self._limit = None

    def left(self) -> float | None:
        """Returns the seconds until the request fails without progress; None: there is no time
        limit."""
        if self._until is not None:
            return self._until - monotonic() if self._until < math.inf else None
        when = None if self._limit is None else self._limit.when()
        return None if when is None else when - asyncio.get_running_loop().time()

    def queued(self, waits_for: str) -> None:
        """Notes what the request waits for until it runs; the queue enforces the time limit."""
        self.waits_for, self._until = waits_for, monotonic() + self._patience

    def progress(self) -> None:
        """Notes progress: blocks were reserved, KV has landed. To spare a timer per token, the
        limit is moved a little late, and not again until it would be early."""
        limit, seconds = self._limit, self._request_timeout
        if limit is None or not seconds or (now := monotonic()) < self._late_enough:
            return
        if not limit.expired():
            slack = min(SLACK, seconds / 16)
            limit.reschedule(asyncio.get_running_loop().time() + seconds + slack)
            self._late_enough = now + slack

    def token(self, now: float) -> None:
        """Notes a token for the client; `now` is `monotonic`."""
        self._patience = self._request_timeout or math.inf
        self.moved = now
        if now >= self._late_enough:
            self.progress()

    @contextmanager
    def waiting(self, waits_for: str = "a node") -> Iterator[float]:
        """Counts the time in which the request waits for `waits_for`; yields the end of the wait
        (`monotonic`)."""
        since = monotonic()
        self._late_enough = 0.0
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
        self.waits_for, self._until = waits_for, since + self._patience
        try:
            yield self._until
        finally:
            self.waits_for, self._until = "", None
            self._patience -= monotonic() - since
            self.progress()


class Retries:
    """One request's failures so far.

    A request continues until its deadline, with longer and longer pauses while no token comes. It
    is *poison*, and ends, when it fails twice in the same way without progress, or when more than
    `limit` nodes in a row have died while they computed it: it must not kill them all. A request
    that makes progress after it failed was not poison: the node was at fault.

    A death counts as the last one only if the node had no other request with its last chance
    (`NodeSelector` sees to it), for either may have been the poison. If many such requests wait for
    few nodes, they share them after `ALONE` seconds. Then a death ends none of them, and they wait
    twice as long for a node to themselves: so poison kills a few nodes more, and no wait is long.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tries = 0  # failures since the last token
        self._deaths: dict[str, float] = {}  # by role, since that role's last token
        # By code, the nodes of failures that suggest poison; cleared by progress of that role.
        self._alike: dict[str, list[Node]] = {}
        self._transfer_failures = 0
        self._last: PdserveError | None = None
        self._alone = ALONE
        self._alone_since: float | None = None  # since when it waits for a node to itself
        self.failures = 0
        self.avoid: set[str] = set()  # nodes (ids) that have failed it: only if there is no other

    @property
    def last_error(self) -> PdserveError | None:
        return self._last

    @property
    def local_prefill(self) -> bool:
        """Whether the decode node should prefill, because transfers failed."""
        return self._transfer_failures >= TRANSFER_FAILURES

    def last_chance(self, role: str) -> bool:
        """Returns whether one more death of a node of this role would end the request. Then it must
        be the only such request on its next node, whatever ran beside it before."""
        deaths = self._num_deaths(role)
        return deaths > 0 and deaths + 1 > self._limit

    def may_share(self) -> bool:
        """Returns whether a request with its last chance, which finds no node without another such
        request, need not wait for one any longer."""
        now = monotonic()
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since >= self._alone

    def placed(self) -> None:
        """Notes that it has found a node: its next wait begins anew."""
        self._alone_since = None

    def _num_deaths(self, role: str) -> float:
        return sum(self._deaths.get(each, 0.0) for each in ALIKE[role])

    def progress(self, role: str) -> None:
        """Notes a token of a node of this role."""
        if not self.failures:
            return
        self._tries = 0
        for each in BEHIND[role]:
            self._deaths.pop(each, None)
        for code, nodes in self._alike.items():
            self._alike[code] = [node for node in nodes if node.role not in BEHIND[role]]
            if has(code, Effect.SOUND):  # which counts for no node until then
                for node in nodes:
                    if node.role in BEHIND[role]:
                        node.breaker.failed()

    def node_failed(
        self, error: PdserveError, node: Node, computing: bool = True, alone: bool = True
    ) -> None:
        """Notes a node's own failure; `computing`: it was at work for this request; `alone`: it had
        no other request with its last chance.

        Raises:
            PdserveError: another try would not help.
        """
        self._note(error, node)
        if has(error.code, Effect.POISON):
            alike = self._alike.setdefault(error.code, [])
            alike.append(node)
            if len(alike) > 1:
                raise _poison("it failed twice in the same way", error)
        if has(error.code, Effect.DEATH):
            more = 1 if computing else WAITING
            if not alone and self._num_deaths(node.role) + more > self._limit:
                self._alone *= 2
                return
            self._deaths[node.role] = self._deaths.get(node.role, 0.0) + more
            if self._num_deaths(node.role) > self._limit:
                raise _poison(f"{node.role} nodes died in a row while they computed it", error)

    def transfer_failed(self, error: PdserveError, node: Node) -> None:
        """Notes that a hand-off failed, as this node reports; it is no node's own failure.

        Raises:
            PdserveError: another try would not help.
        """
        self._note(error, node)
        self._transfer_failures += isinstance(error, TransferError)

    def _note(self, error: PdserveError, node: Node) -> None:
        # Only this router knows whether the client left; for a node the call just ends.
        curable = error.blame in (Blame.PREFILL, Blame.DECODE, Blame.BOTH, Blame.NETWORK)
        curable |= error.code == "CANCELLED"
        if not curable or isinstance(error, RequestError):
            raise error
        self.failures += 1
        self._tries += 1
        self._last = error
        self.avoid.add(node.id)

    async def backoff(self, deadline: Deadline) -> None:
        """Pauses before another try: longer after each failure, with random jitter.

        Raises:
            PdserveError: the last failure, when there is no time left.
        """
        if self._tries < 2:
            return
        with deadline.waiting(f"a pause after {self.failures} failures") as until:
            left = until - monotonic()
            if left <= 0 and self._last is not None:
                raise self._last
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._tries - 2, 10))
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))


def _poison(why: str, error: PdserveError) -> NodeError:
    return NodeError(
        f"{why}, so it is not tried again; the last error was {error}",
        code="POISON_REQUEST",
        blame=Blame.CLIENT,
        retryable=False,
    )
