"""An attack of hostile clients: its requests, their outcomes, and when one of them hangs.

    a request waits ─▶ no progress for `Patience.seconds` ─▶ look at its server, again and again
        the router serves the request, within its time limit ─▶ it is slow
        the server answers `Patience.looks` later requests, and not this one ─▶ it hangs
        the server's port refuses look after look ─▶ the server has ended
        the server answers nothing ─▶ it is late; after `Patience.longest` the request hangs

So a request without an answer hangs because its server has answered others, and not because time
has passed: on a full machine, servers and clients may lack a CPU for minutes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any

import aiohttp
import grpc

from benchmarks.access import Access
from benchmarks.soak.inquiry import Found, inquire

CLOSED = "closed"  # an outcome: the server ended the connection, or has ended itself
HUNG = "hung"  # an outcome: no answer, though the server answered others
UNEXPLAINED = "without a reason"  # a call that ended without a reason from the router: a failure
CUT_SHORT = "Internal error from Core"  # grpc.aio's own INTERNAL, in place of the server's status
GONE = "the router had gone"  # a failure too, unless the router was killed
UNFIT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # without a code of ours
HEALTH = "/grpc.health.v1.Health/Check"
LOOK = 30.0  # seconds that a server has to answer a look


@dataclass(frozen=True, slots=True)
class Fault:
    at: float  # seconds from the start
    kind: str
    target: str  # one of its kind's targets
    seconds: float  # duration
    seed: int  # of its random choices

    @property
    def random(self) -> random.Random:
        return random.Random(self.seed)


class NotNow(Exception):
    """The fault's target does not exist, or is the last healthy one."""


@dataclass(frozen=True, slots=True)
class Patience:
    seconds: float = 60.0  # without progress, after which the server is looked at
    looks: int = 20  # answered, without progress of the request, after which it hangs
    pause: float = 1.0  # seconds between two looks
    longest: float = 600.0  # seconds without progress after which it hangs in any case


@dataclass(slots=True)
class Outcome:
    """The results of an attack, as its process reports them."""

    told: dict[str, int] = field(default_factory=dict)  # words → count
    waits: list[float] = field(default_factory=list)  # seconds that each request waited
    hung: list[str] = field(default_factory=list)  # descriptions
    not_now: bool = False


class Wait:
    """The wait of one request for its server. The time in which it rests does not count."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = count(1)
        self._began = self.since = monotonic()  # `since`: the time of its last progress
        self._rested = 0.0
        self.request_id = name  # by which the router may know it

    @property
    def seconds(self) -> float:
        """The seconds that it has waited in all."""
        return max(0.0, monotonic() - self._began - self._rested)

    def moved(self) -> None:
        """Notes progress: something was answered."""
        self.since = monotonic()

    def another(self) -> str:
        """Notes progress, and returns the id of the next request."""
        self.moved()
        self.request_id = f"{self._name}-{next(self._numbers)}"
        return self.request_id

    async def rest(self, seconds: float) -> None:
        self._rested += seconds
        self.since = monotonic() + seconds
        await asyncio.sleep(seconds)


Look = Callable[[Wait], Awaitable[Found]]  # at the server of a request
Request = Callable[[Wait], Awaitable[str]]  # returns the outcome in a word or two


class Attack:
    """One attack: the hostile clients' access, the fault's random choices, and the outcomes."""

    def __init__(self, fleet: Access, fault: Fault, patience: Patience) -> None:
        self.fleet = fleet
        self.random = fault.random
        self.seconds = fault.seconds
        self.outcome = Outcome()
        self._told: Counter[str] = Counter()
        self._name = f"{fault.kind}-{fault.seed:08x}"
        self._numbers = count(1)
        self._patience = patience

    def tell(self, words: str, times: int = 1) -> None:
        self._told[words] += times
        self.outcome.told = dict(self._told)

    async def ask(self, name: str, request: Request, look: Look | None = None) -> None:
        """Carries out a request and tells its outcome. `look`: at its server, if that is not the
        first router's HTTP server."""
        told = await self.outcome_of(request, look)
        self.tell(f"{name}: {told}" if name else told)

    async def outcome_of(self, request: Request, look: Look | None = None) -> str:
        wait = Wait(f"{self._name}-{next(self._numbers)}")
        task = asyncio.ensure_future(_told(request(wait)))
        try:
            hung = await self._stands(task, wait, look or self._at_router)
        finally:
            task.cancel()
            await asyncio.wait((task,))
            self.outcome.waits.append(round(wait.seconds, 2))
        if hung:
            self.outcome.hung.append(f"{wait.request_id}: {hung}")
            return HUNG
        return CLOSED if task.cancelled() else task.result()

    async def _stands(self, task: asyncio.Future[str], wait: Wait, look: Look) -> str:
        """Waits for the end of the request, or of its server; returns why it hangs, else an empty
        string."""
        patience, looks, known, refused = self._patience, 0, 0.0, 0
        found = Found(False, False, "")
        while not task.done():
            if wait.since != known:
                looks, known = 0, wait.since
            stands = monotonic() - wait.since
            if looks >= patience.looks or stands > patience.longest:
                return (
                    f"no progress for {stands:.0f} s, in which its server answered {looks} looks; "
                    f"{found.words}"
                )
            pause = max(patience.pause, patience.seconds - stands)
            if (await asyncio.wait((task,), timeout=pause))[0] or wait.since != known:
                continue
            found = await look(wait)
            looks += found.answered
            refused = refused + 1 if found.ended else 0
            if refused >= patience.looks:
                return ""
            if found.moves:
                wait.moved()
        return ""

    async def call(self, name: str, request: Request) -> None:
        """Carries out a gRPC call to the first router, and tells its outcome."""
        at_server = at_grpc(self.fleet, f"127.0.0.1:{self.fleet.ports['grpc']}")

        async def look(wait: Wait) -> Found:
            served = await self._at_router(wait)
            if served.moves:
                return served
            found = await at_server(wait)
            return replace(found, words=f"{found.words}; {served.words}")

        await self.ask(name, request, look)

    async def _at_router(self, wait: Wait) -> Found:
        """Looks at the first router: it may serve the request."""
        return await asyncio.to_thread(inquire, self.fleet, wait.request_id, ["router"])


async def _told(request: Awaitable[str]) -> str:
    try:
        return await request
    except grpc.aio.AioRpcError as error:
        return refusal(error) if error.code() in UNFIT else error.code().name
    except (aiohttp.ClientError, OSError):
        return CLOSED


def refusal(error: grpc.aio.AioRpcError) -> str:
    """Returns what a call was told that did not end well."""
    if "pdserve-error-code" in {key for key, _ in error.trailing_metadata() or ()}:
        return error.code().name
    if error.details() == CUT_SHORT:
        return "ended during a write"
    return GONE if error.code() is grpc.StatusCode.UNAVAILABLE else UNEXPLAINED


# ---- looks at servers that are not asked about a request ----


def at_grpc(fleet: Access, address: str) -> Look:
    """Looks at a gRPC server: its health service answers or refuses."""

    async def look(_: Wait) -> Found:
        async with calls(fleet, address) as channel:
            call = channel.unary_unary(HEALTH)(b"", timeout=LOOK)
            code, details = await call.code(), await call.details() or ""
        silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        ended = code in silent and "Connection refused" in details
        return Found(False, code not in silent, f"{address} says {code.name}", ended)

    return look


def at_http(port: tuple[str, int]) -> Look:
    """Looks at an HTTP server: its /health answers."""

    async def look(_: Wait) -> Found:
        line, ended = b"", False
        try:
            async with asyncio.timeout(LOOK):
                reader, writer = await asyncio.open_connection(*port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                line = await reader.readline()
                writer.close()
        except OSError as error:
            ended = isinstance(error, ConnectionRefusedError)
        return Found(False, bool(line), f"{port[0]}:{port[1]} says {line!r}", ended)

    return look


@asynccontextmanager
async def calls(
    fleet: Access, address: str, trusted: bool = False, name: str = ""
) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel with the credentials of a role (`trusted`), or of a stranger, who may be a
    client. `name`: the name expected in the server's certificate, if not the address."""
    credentials = fleet.credentials(role=trusted)
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if name:
        options.append(("grpc.ssl_target_name_override", name.rpartition(":")[0]))
    channel = (
        grpc.aio.secure_channel(address, credentials, options)
        if credentials
        else grpc.aio.insecure_channel(address, options)
    )
    async with channel:
        yield channel


async def nodes_of(fleet: Access) -> list[dict[str, Any]]:
    """Returns the fleet's nodes in `/v1/cluster`. Raises NotNow."""
    try:
        nodes: list[dict[str, Any]] = (await asyncio.to_thread(fleet.state))["nodes"]
    except OSError:
        raise NotNow from None
    if not (ours := [node for node in nodes if node["name"]]):
        raise NotNow
    return ours


@dataclass(frozen=True, slots=True)
class Hostile:
    """A kind of attack, as `faults.Kind`."""

    attack: Callable[[Attack], Awaitable[None]]  # raises NotNow
    targets: tuple[str, ...] = ("client",)
    longest: float | None = None  # longest duration in seconds, if not the plan's
    weight: float = 1.0  # relative frequency
    crowds: bool = False  # thousands of calls or connections exist meanwhile
    greedy: bool = False  # other requests compete with it for their share
    apart: bool = False  # in a process of its own, since it takes all the time of an event loop
