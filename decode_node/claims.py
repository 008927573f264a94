"""Claims of routers to make the answer of an Idempotency-Key; without I/O.

    Claim ─▶ Claims.enter ─▶ Place ── first in line: granted
                                └──── behind it: waits, and knows where the job is kept

A place lasts as long as its router's call. When the first in line has left, the next one is granted
the claim, and knows where the job was kept. That is remembered for `--orphan-lease` seconds, too,
after the last one has left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from pdserve.common.core.errors import Conflict, InvalidRequest, KeyReused, Overloaded
from pdserve.common.rpc.pb import cluster_pb2 as pb

MAX_CLAIMS = 8192  # at a node
MAX_OF_CLIENT = 2048
MAX_IN_LINE = 32  # for one claim
KEY_NBYTES = 32
MAX_NAME = 128  # characters


class Claim:
    """The claim on one key: the waiting routers, in order, and where the job is kept."""

    def __init__(self, key: bytes, request: bytes, client: str) -> None:
        self.key, self.request, self.client = key, request, client
        self.line: list[Place] = []
        self.kept_at: pb.KeptAt | None = None
        self.lapse: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Notifies all waiting routers."""
        for place in self.line:
            place.news.set()


class Place:
    """One call's place in the queue."""

    def __init__(self, claim: Claim) -> None:
        self.news = asyncio.Event()
        self.news.set()
        self._claim = claim

    @property
    def granted(self) -> bool:
        return self._claim.line[0] is self

    def told(self) -> pb.ClaimResponse:
        """Returns the state that its router should know now."""
        self.news.clear()
        return pb.ClaimResponse(granted=self.granted, kept_at=self._claim.kept_at)


class Claims:
    """Keeps the claims at a node."""

    def __init__(self, lease: float) -> None:
        """`lease`: seconds for which a claim without a holder is remembered."""
        self._lease = lease
        self._claims: dict[bytes, Claim] = {}
        self._counts: Counter[str] = Counter()  # by client
        self._left: dict[Claim, None] = {}  # claims without a holder, the oldest first

    def __len__(self) -> int:
        return len(self._claims)

    @contextmanager
    def enter(self, message: pb.ClaimRequest) -> Iterator[Place]:
        """Yields a place in the line for the claim of the message.

        Raises:
            InvalidRequest: the message makes no sense.
            KeyReused: another request has the key.
            Conflict: too many wait for this claim.
            Overloaded: there are too many claims.
        """
        claim = self._find(message)
        place = Place(claim)
        claim.line.append(place)
        try:
            yield place
        finally:
            claim.line.remove(place)
            claim.changed()
            if not claim.line:
                self._all_left(claim)

    def tell_kept(self, message: pb.TellKeptRequest) -> None:
        """Notes where the job of a claim is kept, if there is such a claim, and notifies the
        waiting routers.

        Raises:
            InvalidRequest: the message makes no sense.
        """
        if not 0 < len(message.kept_at.node_id) <= MAX_NAME:
            raise InvalidRequest("a job is kept at a node")
        claim = self._claims.get(message.key)
        if claim is not None and claim.request == message.request:
            claim.kept_at = message.kept_at
            for place in claim.line[1:]:
                place.news.set()

    def _find(self, message: pb.ClaimRequest) -> Claim:
        key, request, client = message.key, message.request, message.client
        if not len(key) == len(request) == KEY_NBYTES or len(client) > MAX_NAME:
            raise InvalidRequest("a claim has a key, a request and a client")
        claim = self._claims.get(key)
        if claim is None:
            self._check_room(client)
            claim = self._claims[key] = Claim(key, request, client)
            self._counts[client] += 1
        elif claim.request != request:
            raise KeyReused("another request of this client has the same Idempotency-Key")
        elif len(claim.line) >= MAX_IN_LINE:
            raise Conflict(f"{MAX_IN_LINE} wait for the answer of this Idempotency-Key")
        self._left.pop(claim, None)
        if claim.lapse is not None:
            claim.lapse.cancel()
        return claim

    def _check_room(self, client: str) -> None:
        if self._counts[client] >= MAX_OF_CLIENT or len(self._claims) >= MAX_CLAIMS:
            own = (claim for claim in self._left if claim.client == client)
            others = iter(self._left if self._counts[client] < MAX_OF_CLIENT else ())
            oldest = next(own, None) or next(others, None)
            if oldest is None:
                raise Overloaded("too many requests have an Idempotency-Key", retry_after=1.0)
            self._forget(oldest)

    def _all_left(self, claim: Claim) -> None:
        if claim.kept_at is None or not self._lease:
            self._forget(claim)
            return
        self._left[claim] = None
        loop = asyncio.get_running_loop()
        claim.lapse = loop.call_later(self._lease, self._forget, claim)

    def _forget(self, claim: Claim) -> None:
        if claim.lapse is not None:
            claim.lapse.cancel()
        self._left.pop(claim, None)
        del self._claims[claim.key]
        self._counts[claim.client] -= 1
        if not self._counts[claim.client]:
            del self._counts[claim.client]


async def serve_claim(
    claims: Claims, message: pb.ClaimRequest
) -> AsyncGenerator[pb.ClaimResponse, None]:
    """Yields the claim's news for a router, until it is closed. Raises as `Claims.enter`."""
    with claims.enter(message) as place:
        while True:
            await place.news.wait()
            yield place.told()
