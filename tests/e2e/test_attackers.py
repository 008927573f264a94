"""Requests of hostile clients hang if their server answers others, not if it is late; and what the
clients find is reported."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

import http_site
from benchmarks.access import Access
from benchmarks.soak import crowd, floods
from benchmarks.soak.attack import HUNG, Attack, Fault, Patience, Wait, at_grpc, at_http
from benchmarks.soak.attackers import Attackers
from benchmarks.soak.inquiry import Found
from benchmarks.soak.subscribers import kv_ports
from fakes_pipeline import byte_level_folder
from http_site import serve
from pdserve.common.rpc import server as rpc_server
from pdserve.router.api.auth import APIKeys
from pdserve.router.http.app import make_app

SOON = Patience(seconds=0.02, looks=4, pause=0.001, longest=60.0)
FAULT = Fault(0.0, "foreign", "client", 0.1, seed=1)
SILENT = Found(False, False, "nothing")
ANSWERED = Found(False, True, "router: unknown")
ENDED = Found(False, False, "refused", ended=True)
MOVES = Found(True, True, "router: 3 tokens")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def attack_on(patience: Patience = SOON, **ports: int) -> Attack:
    return Attack(Access({"router": ports}, {}), FAULT, patience)


# ---- one request and the looks at its server ----


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        ([ANSWERED] * 9, HUNG),
        ([SILENT] * 9, "answered"),  # a late server
        ([MOVES] * 9, "answered"),  # a long request
        ([*[ANSWERED] * 3, MOVES, *[ANSWERED] * 3], "answered"),
        ([*[SILENT] * 9, *[ANSWERED] * 5], HUNG),
        ([*[SILENT] * 9, *[ENDED] * 5], "closed"),  # the fault, or another one, ended the server
        ([*[ENDED] * 3, SILENT, *[ENDED] * 3], "answered"),  # it was started again
    ],
)
async def test_a_request_hangs_if_its_server_answers_others(
    looks: list[Found], outcome: str
) -> None:
    attack, left, answered = attack_on(), iter(looks), asyncio.Event()

    async def request(wait: Wait) -> str:
        await answered.wait()
        return "answered"

    async def look(_: Wait) -> Found:
        found = next(left, None)
        if found is None:
            answered.set()
        return found or SILENT

    assert await attack.outcome_of(request, look) == outcome
    assert len(attack.outcome.hung) == (outcome == HUNG) and len(attack.outcome.waits) == 1
    assert all("answered 4 looks; router: unknown" in each for each in attack.outcome.hung)


async def test_a_server_that_never_answers_hangs_at_last() -> None:
    async def request(wait: Wait) -> str:
        await asyncio.Event().wait()
        return "never"

    async def look(_: Wait) -> Found:
        return SILENT

    attack = attack_on(replace(SOON, longest=0.1))
    assert await attack.outcome_of(request, look) == HUNG
    assert attack.outcome.waits[0] >= 0.1


async def test_progress_and_rest_are_no_standstill() -> None:
    async def request(wait: Wait) -> str:
        await wait.rest(0.1)
        for _ in range(10):
            await asyncio.sleep(0.01)
            wait.moved()
        return "answered"

    async def look(_: Wait) -> Found:
        raise AssertionError("nothing stands")

    attack = attack_on(replace(SOON, seconds=0.09))
    assert await attack.outcome_of(request, look) == "answered"


@pytest.mark.parametrize("kind", ["at_http", "at_grpc"])
async def test_a_server_that_has_ended_is_no_hung_request(kind: str) -> None:
    """It took 600 s, and the soak failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    attack = attack_on()
    look = (
        at_http(address)
        if kind == "at_http"
        else at_grpc(attack.fleet, f"{address[0]}:{address[1]}")
    )

    async def request(wait: Wait) -> str:
        await asyncio.Event().wait()
        return "never"

    assert await attack.outcome_of(request, look) == "closed"
    assert attack.outcome.hung == []


# ---- real servers that swallow one request ----


@web.middleware
async def swallow(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method == "POST" and not request.app[SWALLOWED]:
        request.app[SWALLOWED].append(request.path)
        await asyncio.Event().wait()
    return await handler(request)


SWALLOWED = web.AppKey("swallowed", list[str])


async def test_a_request_that_a_router_swallows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(*args: Any, **options: Any) -> web.Application:
        app = make_app(*args, **options)
        app.middlewares.insert(0, swallow)
        app[SWALLOWED] = []
        return app

    monkeypatch.setattr(http_site, "make_app", seeded)
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("sk", "an-operator")) as site:
        access = Access({"router": {"http": site.port}}, {"admin_api_key": "an-operator"})
        attackers = Attackers(access, replace(SOON, seconds=0.5))
        async with attackers.running([FAULT.kind]):
            first, second = [await attackers.attack(FAULT) for _ in range(2)]
    [told] = first.told
    assert told.endswith(": hung") and first.told == {told: 1}
    assert "its server answered 4 looks; router: unknown" in first.hung[0]
    assert second.told == {told.replace(HUNG, "403"): 1} and second.hung == []


@asynccontextmanager
async def grpc_server(methods: dict[str, Any], service: str, **options: int) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[*options.items()] or rpc_server._OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_call_of_a_crowd_that_is_swallowed_is_found() -> None:
    calls: list[bytes] = []

    async def generate(request: bytes, context: object) -> AsyncIterator[bytes]:
        calls.append(request)
        if len(calls) == 7:
            await asyncio.Event().wait()
        yield b""

    methods = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    async with grpc_server(methods, "pdserve.v1.Inference") as address:
        attack = attack_on(grpc=int(address.rpartition(":")[2]))
        await crowd.ask_at_once(attack, 20)
    assert attack.outcome.told == {"calls at once: OK": 19, "calls at once: hung": 1}
    assert "says UNIMPLEMENTED" in attack.outcome.hung[0]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_server_that_reads_what_strangers_send_is_found(reads: bool) -> None:
    async def told(messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        if reads:
            [len(each) async for each in messages]
        yield b""

    methods = {"Check": grpc.stream_stream_rpc_method_handler(told)}
    limits = {"grpc.max_receive_message_length": -1} if reads else {}
    async with grpc_server(methods, "grpc.health.v1.Health", **limits) as address:
        attack = attack_on(Patience())
        method = "/grpc.health.v1.Health/Check"
        found = await floods._flood(attack, address, method, 2**22, floods.MAX_TAKEN)
    assert found == (floods.TAKEN if reads else "told")


def test_subscribers_find_the_ports_of_a_node_that_are_not_known() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as known,
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("0.0.0.0", 0)) as everywhere,
    ):
        ports = [each.getsockname()[1] for each in (known, one, everywhere)]
        address = f"127.0.0.1:{ports[0]}"
        node = {"name": "node", "address": address, "metrics_address": address}
        fleet = Access({"router": {}}, {}, pids={"node": os.getpid()})
        found = kv_ports(fleet, node)
        assert {("127.0.0.1", port) for port in ports[1:]} <= {*found}
        assert ("127.0.0.1", ports[0]) not in found
        assert kv_ports(fleet, {**node, "name": "another host's"}) == []
