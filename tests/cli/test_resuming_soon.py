"""A client of two routers does not wait long for one that vanished or stands still."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import Site, serve
from pdserve.client import watch
from pdserve.client.resuming import AsyncResumingClient, ResumingClient

BODY = {"prompt": "a", "max_tokens": 8, "seed": 1}
PATH = "/v1/completions"


class Relay:
    """A port of the site whose host stands still after so many bytes of its answers: connections
    stay, or are made, and nothing comes."""

    def __init__(self, site: Site, after: int) -> None:
        self._site = site
        self._left = after
        self.frozen = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", self._site.port)
        self._pumps.append(asyncio.create_task(self._pump(reader, far[1], False)))
        self._pumps.append(asyncio.create_task(self._pump(far[0], writer, True)))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool
    ) -> None:
        try:
            while data := await reader.read(64):
                if self._left <= 0:
                    self.frozen.set()
                    await asyncio.Event().wait()
                self._left -= len(data) if counts else 0
                writer.write(data)
        finally:
            with suppress(RuntimeError):
                writer.transport.abort()


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    for name in ("CONNECT", "QUIET", "PROBE"):
        monkeypatch.setattr(watch, name, 0.2)
    async with serve(byte_level_folder(tmp_path), event_keys=(b"k",)) as made:
        yield made


async def streamed(urls: list[str], kind: str, body: dict[str, Any] = BODY) -> str:
    if kind == "async":
        async with AsyncResumingClient(urls) as client:
            chunks = [chunk async for chunk in client.stream(PATH, body)]
    else:
        client = ResumingClient(urls)
        chunks = await asyncio.to_thread(lambda: list(client.stream(PATH, body)))
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


async def completed(urls: list[str], kind: str, body: dict[str, Any] = BODY) -> Any:
    if kind == "async":
        async with AsyncResumingClient(urls) as client:
            return await client.complete(PATH, body)
    return await asyncio.to_thread(ResumingClient(urls).complete, PATH, body)


async def text_of(site: Site) -> str:
    return str((await site.complete(max_tokens=8, seed=1))["choices"][0]["text"])


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("after", [0, 1500])
async def test_a_stream_leaves_a_router_that_stands_still(
    site: Site, kind: str, after: int
) -> None:
    """It took a minute."""
    async with asyncio.timeout(30), Relay(site, after) as relay:
        text = await streamed([relay.url, site.url], kind)
        assert relay.frozen.is_set()
        past = site.generator.requests[-1].past
        had = site.tokenizer.decode([i for each in past for i in each.token_ids], True)
        # The fake generator begins anew after what the client has.
        assert text == had + await text_of(site) and bool(had) == bool(after)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("after", [0, 100])
async def test_a_whole_answer_leaves_a_router_that_stands_still(
    site: Site, kind: str, after: int
) -> None:
    """It took ten minutes."""
    async with asyncio.timeout(30), Relay(site, after) as relay:
        answer = await completed([relay.url, site.url], kind)
        assert answer["choices"][0]["text"] == await text_of(site)
        assert relay.frozen.is_set()


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("ask", [streamed, completed])
async def test_a_router_that_vanished_is_not_waited_for(site: Site, kind: str, ask: Any) -> None:
    """Its host answers no packet, as here the port of a full backlog: that took two minutes."""
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in (one, two):
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(full.getsockname())
        async with asyncio.timeout(30):
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            found = await ask([url, site.url], kind)
    text = found if isinstance(found, str) else found["choices"][0]["text"]
    assert text == await text_of(site)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("ask", [streamed, completed])
async def test_a_router_that_is_only_slow_is_waited_for(site: Site, kind: str, ask: Any) -> None:
    """Its health answers meanwhile."""
    site.generator.delay = 0.3
    async with asyncio.timeout(30):
        body = BODY | {"max_tokens": 2}
        assert await ask([site.url, "http://127.0.0.1:9"], kind, body)
    assert len(site.generator.requests) == 1
