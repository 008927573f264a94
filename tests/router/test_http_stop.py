"""A router that stops: what waits in its socket is answered, and balancers hear of it first."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from http_site import Site
from pdserve.router.http import server as module
from waiting import eventually

NUM_WAITING = 40  # more than are accepted in one turn of the event loop


def asked(port: int) -> socket.socket:
    """A client's connection, with its request; the server has not seen it yet."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def answer(connection: socket.socket) -> str:
    """All that comes until the server closes the connection; raises if it resets it."""
    with connection:
        connection.settimeout(60)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


async def test_requests_waiting_in_the_socket_are_answered(site: Site) -> None:
    connections = [asked(site.port) for _ in range(NUM_WAITING)]
    silent = socket.create_connection(("127.0.0.1", site.port))  # asks for nothing
    await site.server.stop(drain_timeout=60)
    for connection in connections:
        said = await asyncio.to_thread(answer, connection)
        assert said.startswith("HTTP/1.1 200 ") and "Connection: close" in said
    assert answer(silent) == ""
    with pytest.raises(ConnectionRefusedError):
        asked(site.port)


async def test_balancers_hear_of_a_stop_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves on until they have gone; each answer closes its connection."""
    monkeypatch.setattr(module, "LAME_DUCK", 600)
    monkeypatch.setattr(module, "QUIET", 600)

    async def is_ready() -> bool:
        async with site.session.get(f"{site.url}/ready") as response:
            return response.status == 200

    assert await is_ready()
    stop = asyncio.create_task(site.server.stop(drain_timeout=600))
    await asyncio.sleep(0)
    for _ in range(3):
        assert not await is_ready()
        response = await site.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert response.status == 200 and response.headers["Connection"] == "close"
    assert not stop.done()
    stop.cancel()


async def test_without_a_balancer_a_stop_is_quick(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No balancer would see that it is not ready any more."""
    monkeypatch.setattr(module, "QUIET", 600)
    await site.complete(max_tokens=1)
    stop = asyncio.create_task(site.server.stop(drain_timeout=600))
    await eventually(stop.done)
    await stop
