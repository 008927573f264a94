"""Keeps requests in flight while something happens, and compares every answer with the one
that nothing happened to."""

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

from benchmarks.fleet import LOAD, Fleet
from benchmarks.soak.asks import Ask
from benchmarks.soak.client import Answer, Client, Lost, difference
from benchmarks.soak.inquiry import Found, inquire
from pdserve.client.resuming import AsyncResumingClient
from pdserve.client.resuming_grpc import AsyncResumingStub

# Seconds after which the routers are asked where a request is: one that does not get further hangs,
# which is as good as lost.
TIMEOUT = 120.0
LOOKS = 10.0  # seconds from one question to the next
PATIENT_LOOKS = 3  # that find it standing: its answer may be on its way, or another try may come
LONGEST = 900.0  # seconds after which it hangs, whatever they say
LAST_LOOK = 1.0  # seconds until the client of one that hangs leaves: processes may say what they do
CALM_CONCURRENCY = 32
PATIENCE = 2.0  # seconds, at most, until a client that does so hangs up


@dataclass(slots=True)
class Tally:
    """The counts of requests by outcome."""

    completed: int = 0
    hung_up: int = 0
    router_died: int = 0  # requests that ended with the router that served them
    tokens: int = 0
    migrations: int = 0
    lost: list[str] = field(default_factory=list)  # why
    hung: list[str] = field(default_factory=list)  # what had no end
    wrong: list[str] = field(default_factory=list)  # in what
    gaps: list[float] = field(default_factory=list)  # the longest of each stream that migrated

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
    """Clients of the routers, by name: each asks through one of them, and goes to the next when
    that has died. `inquire` asks them where a request is, by its id. `expected` has the right
    answers to each ask, one in each version of the model that may serve; `learn` finds them."""

    def __init__(
        self, clients: Mapping[str, Client], asks: Sequence[Ask], inquire: Callable[[str], Found]
    ) -> None:
        self._clients = dict(clients)
        self._inquire = inquire
        self._numbers = count()
        self.asks = list(asks)
        self.expected: list[list[Answer]] = [[] for _ in asks]

    async def learn(self) -> None:
        """Notes the answers of a cluster that is left alone. Raises Lost."""
        for expected, answer in zip(self.expected, await self.ask_all(), strict=True):
            expected.append(answer)

    async def ask_all(self) -> list[Answer]:
        """Asks everything once. Raises Lost."""
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
        """`in_flight` clients ask one thing after the other until the event is over, and wait
        for their last answers; a share of the requests is hung up. `excused` says whether a
        connection to a router that has broken, of a request since then, may be because it died;
        `look` is called when a request hangs, before its client leaves. An event that looks at
        the `tally` brings its own. `stood_still` says for how long a router did between two
        times, which is no node's recovery."""
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
        """Returns false if the router has died."""
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
                await asyncio.sleep(0 if len(self._clients) > 1 else 1)  # until there is another
                return False
            tally.lost.append(str(error))
            await asyncio.sleep(0.1)  # a cluster that refuses at once is not to be flooded
        else:
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
        """Returns the answer, however late it comes while the request gets further: on its nodes,
        or on the way to a client that hardly gets a CPU. Raises Lost; TimeoutError: it hangs, and
        where."""
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
    """Clients of a fleet's routers of these names, who have not learnt the answers yet. Those of
    several, which need a cluster key, lose nothing when one dies."""
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
    # After a router's death it is tried again soon.
    options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]
    address, credentials = f"127.0.0.1:{port}", fleet.credentials()
    if credentials:
        return grpc.aio.secure_channel(address, credentials, options)
    return grpc.aio.insecure_channel(address, options)
