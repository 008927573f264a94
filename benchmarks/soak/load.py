"""Keeps requests in flight during faults, and compares every answer with that of an undisturbed
cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice
from time import monotonic
from typing import Any

import aiohttp
import grpc

from benchmarks.access import LOAD
from benchmarks.fleet import Fleet
from benchmarks.soak.asks import Ask
from benchmarks.soak.client import Answer, Client, Lost, difference
from benchmarks.soak.inquiry import Found, inquire
from pdserve.client.resuming import AsyncResumingClient
from pdserve.client.resuming_grpc import AsyncResumingStub

# Seconds after which the routers are asked about a request. A request without progress counts as
# hung, which is as bad as lost.
TIMEOUT = 120.0
LOOKS = 10.0  # seconds between two questions
PATIENT_LOOKS = 3  # questions without progress before it counts as hung
LONGEST = 900.0  # seconds after which it counts as hung in any case
LAST_LOOK = 1.0  # seconds before the client of a hung request leaves, for stack dumps
CALM_CONCURRENCY = 32
PATIENCE = 2.0  # longest time until a client that hangs up does so


@dataclass(slots=True)
class Tally:
    """The counts of requests by outcome."""

    completed: int = 0
    hung_up: int = 0
    router_died: int = 0  # requests lost by the death of their router
    tokens: int = 0
    migrations: int = 0
    lost: list[str] = field(default_factory=list)  # reasons
    hung: list[str] = field(default_factory=list)  # descriptions
    wrong: list[str] = field(default_factory=list)  # differences
    gaps: list[float] = field(default_factory=list)  # longest gap of each migrated stream
    seconds: list[float] = field(default_factory=list)  # of each request with an answer

    @property
    def requests(self) -> int:
        failed = len(self.lost) + len(self.hung) + len(self.wrong)
        return self.completed + self.hung_up + self.router_died + failed

    def add(
        self,
        ask: Ask,
        answer: Answer,
        expected: Sequence[Answer],
        stood_still: Callable[[float, float], float],
    ) -> None:
        differences = [difference(each, answer) for each in expected]
        if all(differences):
            self.wrong.append(f"{ask.way} {ask.options}, {len(ask.prompt)} tokens: {differences}")
        else:
            self.completed += 1
        self.tokens += answer.completion_tokens
        self.migrations += answer.migrations
        if answer.migrations and ask.way != "whole":
            self.gaps.append(answer.longest_gap(stood_still))


class Load:
    """Clients of the routers, by name. Each sends requests to one router, and switches to the next
    when it dies. `inquire` asks the routers about a request id. `expected` has the right answers to
    each request, one per version of the model that may serve; `learn` fills it in."""

    def __init__(
        self, clients: Mapping[str, Client], asks: Sequence[Ask], inquire: Callable[[str], Found]
    ) -> None:
        self._clients = dict(clients)
        self._inquire = inquire
        self._numbers = count()
        self.asks = list(asks)
        self.expected: list[list[Answer]] = [[] for _ in asks]

    async def learn(self) -> None:
        """Records the answers of the undisturbed cluster. Raises Lost."""
        for expected, answer in zip(self.expected, await self.ask_all(), strict=True):
            expected.append(answer)

    async def ask_all(self) -> list[Answer]:
        """Sends every request once. Raises Lost."""
        places = asyncio.Semaphore(CALM_CONCURRENCY)

        async def one(ask: Ask, client: Client) -> Answer:
            async with places, asyncio.timeout(TIMEOUT):
                return await client.send(ask)

        return await asyncio.gather(*map(one, self.asks, cycle(self._clients.values())))

    async def during(
        self,
        event: Coroutine[Any, Any, None],
        in_flight: int,
        hang_ups: float = 0.0,
        seed: int = 0,
        excused: Callable[[str, float], bool] = lambda router, since: False,
        look: Callable[[], None] = lambda: None,
        tally: Tally | None = None,
        stood_still: Callable[[str, float, float], float] = lambda router, since, until: 0.0,
    ) -> Tally:
        """Keeps `in_flight` requests in flight until the event is over, and waits for the last
        answers; hangs up on a share of them. `excused`: whether a broken connection to a router,
        for a request since the given time, may be due to its death. `look`: called for a hung
        request before its client leaves. Pass a `tally` to read it during the event. `stood_still`:
        seconds between two times in which no router ran, which do not count as recovery."""
        tally = Tally() if tally is None else tally
        over = asyncio.Event()

        async def ask_on(number: int) -> None:
            rng, routers = random.Random(f"{seed}/{number}"), cycle(self._clients)
            router = next(islice(routers, number % len(self._clients), None))
            while not over.is_set():
                hangs_up = rng.random() < hang_ups
                if not await self._ask(rng, router, hangs_up, tally, excused, look, stood_still):
                    router = next(routers)

        async with asyncio.TaskGroup() as group:
            for number in range(in_flight):
                group.create_task(ask_on(number))
            await event
            over.set()
        return tally

    async def _ask(
        self,
        rng: random.Random,
        router: str,
        hangs_up: bool,
        tally: Tally,
        excused: Callable[[str, float], bool],
        look: Callable[[], None],
        stood_still: Callable[[str, float, float], float],
    ) -> bool:
        """Sends one request; returns False if the router has died."""
        number, since = rng.randrange(len(self.asks)), monotonic()
        ask = self.asks[number]
        request_id = f"soak-{next(self._numbers)}"
        coming = Answer()
        sending = asyncio.create_task(self._clients[router].send(ask, request_id, coming))
        try:
            if hangs_up:
                async with asyncio.timeout(rng.uniform(0, PATIENCE)):
                    answer = await sending
            else:
                answer = await self._ended(sending, request_id, coming, look)
        except TimeoutError as error:
            if hangs_up:
                tally.hung_up += 1
            else:
                tally.hung.append(f"{ask.way}, {len(ask.prompt)} tokens: {error}")
        except Lost as error:
            if error.broken and excused(router, since):
                tally.router_died += 1
                await asyncio.sleep(0 if len(self._clients) > 1 else 1)  # waits for another router
                return False
            tally.lost.append(str(error))
            await asyncio.sleep(0.1)  # do not flood a cluster that refuses
        else:
            tally.seconds.append(monotonic() - since)
            tally.add(ask, answer, self.expected[number], partial(stood_still, router))
        finally:
            sending.cancel()
        return True

    async def _ended(
        self,
        sending: asyncio.Task[Answer],
        request_id: str,
        coming: Answer,
        look: Callable[[], None],
    ) -> Answer:
        """Returns the answer as long as the request makes progress: on its nodes, or on the way to
        a client that hardly gets a CPU. Raises Lost; TimeoutError, with the place, if it hangs."""
        since, pause, stood, heard = monotonic(), TIMEOUT, 0, 0
        while not (await asyncio.wait((sending,), timeout=pause))[0]:
            found = await asyncio.to_thread(self._inquire, request_id)
            moves = found.moves or len(coming.times) > heard
            stood, pause, heard = 0 if moves else stood + 1, LOOKS, len(coming.times)
            seconds = monotonic() - since
            if stood >= PATIENT_LOOKS or seconds > LONGEST:
                look()
                await asyncio.sleep(LAST_LOOK)
                what = f"{request_id}: {heard} events in {seconds:.0f} s"
                raise TimeoutError(f"{what}; {found.words}")
        return sending.result()


@asynccontextmanager
async def clients(
    fleet: Fleet, asks: Sequence[Ask], routers: Sequence[str] = ("router",)
) -> AsyncIterator[Load]:
    """Yields clients of these routers, without learnt answers. Resuming clients, which several
    routers with a cluster key allow, lose nothing when a router dies."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    key = fleet.api_key(LOAD)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20)
        )
        urls = {name: f"http://127.0.0.1:{fleet.routers[name]['http']}" for name in routers}
        resuming = None
        if len(routers) > 1:
            token = key.get("authorization", "").removeprefix("Bearer ")
            addresses = [f"127.0.0.1:{fleet.routers[name]['grpc']}" for name in routers]
            resuming = (
                await stack.enter_async_context(
                    AsyncResumingClient([*urls.values()], token, TIMEOUT)
                ),
                await stack.enter_async_context(
                    AsyncResumingStub(addresses, token, fleet.credentials(), TIMEOUT)
                ),
            )
        made: dict[str, Client] = {}
        for name, url in urls.items():
            grpc_port = fleet.routers[name]["grpc"]
            channel = await stack.enter_async_context(_channel(fleet, grpc_port))
            made[name] = Client(session, url, channel, key, resuming)
        yield Load(made, asks, partial(inquire, fleet))


def _channel(fleet: Fleet, port: int) -> grpc.aio.Channel:
    # Reconnects soon after a router's death.
    options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]
    address, credentials = f"127.0.0.1:{port}", fleet.credentials()
    if credentials:
        return grpc.aio.secure_channel(address, credentials, options)
    return grpc.aio.insecure_channel(address, options)
