"""More connections than a server has room for, and what is no HTTP, at ports that strangers
reach. The servers are processes of their own, which may open few files."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.cli.certs import HOSTS, write
from pdserve.common.config.router import ServerConfig
from pdserve.common.http import connection as connection_module
from pdserve.common.http.connection import Limits, answering, connection_of
from pdserve.common.http.listener import bind_all
from pdserve.common.http.server import WebServer
from pdserve.common.obs import http as metrics_module
from pdserve.common.obs.http import bind_metrics, start_metrics_server
from pdserve.router.http.server import https_context

FILES, CROWD = 256, 400
OK = b"HTTP/1.1 200 OK\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
SERVER = """
import asyncio, logging, resource, sys
from aiohttp import web
from prometheus_client import CollectorRegistry
from pdserve.common.http.connection import Limits, answering, connection_of
from pdserve.common.http.server import WebServer
from pdserve.common.obs.http import bind_metrics, start_metrics_server

async def work(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()

async def health(request):
    return web.Response()

async def main(files, kind):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    logging.basicConfig(level=logging.INFO)
    bound = bind_metrics("127.0.0.1", 0)
    if kind == "metrics":
        server = await start_metrics_server(bound, CollectorRegistry(), lambda: (True, ""))
    else:
        app = web.Application(middlewares=[answering])
        app.router.add_get("/health", health)
        limits = Limits(max_connections=10**6)  # more than files
        server = await WebServer.start(app, [bound], limits, lambda error: web.Response(status=400))
    other = await asyncio.start_server(work, "127.0.0.1", 0)
    print(server.port, other.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()

asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


class Process:
    def __init__(self, port: int, work: int) -> None:
        self.port, self.work = port, work
        self.log = b""
        self._began = monotonic()

    def check_log(self, lines: int) -> None:
        """It has a line a second at most, beside so many."""
        assert self.log.count(b"\n") <= lines + monotonic() - self._began, self.log


@asynccontextmanager
async def serving(files: int, kind: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(files), kind),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            server = Process(*map(int, (await process.stdout.readline()).split()))
        yield server
    finally:
        _, server.log = await process.communicate(b"")
    assert process.returncode == 0, server.log
    assert b"Traceback" not in server.log


async def ask(port: int, request: bytes = GET) -> bytes:
    """The first line of the answer; empty when there is none."""
    async with asyncio.timeout(60):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            line = await reader.readline()
        except ConnectionError:
            return b""
        writer.close()
        return line


@asynccontextmanager
async def crowd(port: int, size: int) -> AsyncIterator[None]:
    """Connections that say nothing; those that are hung up on come again."""

    async def one() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                await reader.read()
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()
            await asyncio.sleep(3)

    tasks = [asyncio.create_task(one()) for _ in range(size)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def scrape(port: int) -> None:
    """One that is tried again, as all are."""
    answers = []
    while OK not in answers:
        assert len(answers) < 20, answers
        answers.append(await ask(port))


async def test_a_crowd_at_a_metrics_port_leaves_files_for_the_nodes_work() -> None:
    async with serving(FILES, "metrics") as server, crowd(server.port, CROWD):
        for _ in range(10):
            assert await ask(server.work, b"work\n") == b"work\n"
            await scrape(server.port)
    server.check_log(10)


async def test_a_crowd_that_takes_all_files_is_a_line_a_second_and_makes_room() -> None:
    async with serving(64, "web") as server, crowd(server.port, 200):
        for _ in range(10):
            await scrape(server.port)
    assert b"no room for a connection: Too many open files" in server.log
    server.check_log(30)


# ---- in this process ------------------------------------------------------------------------


class Small:
    """A server with room for so many connections; GET /busy and POST /body are answered when it is
    `done`."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.owed, self.has_body = asyncio.Event(), asyncio.Event()
        self.server: WebServer

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def busy(self, _: web.Request) -> web.Response:
        await self.done.wait()
        return web.Response()

    async def body(self, request: web.Request) -> web.Response:
        connection = connection_of(request)
        assert connection is not None
        with connection.reading():
            self.owed.set()
            await request.read()
        self.has_body.set()
        return await self.busy(request)


@asynccontextmanager
async def small(most: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Small]:
    small = Small()
    app = web.Application(middlewares=[answering])
    app.router.add_get("/health", small.health)
    app.router.add_get("/busy", small.busy)
    app.router.add_post("/body", small.body)
    sockets, limits = await bind_all("127.0.0.1", 0), Limits(max_connections=most)
    small.server = await WebServer.start(
        app, sockets, limits, lambda _: web.Response(status=400), tls
    )
    try:
        yield small
    finally:
        small.done.set()
        await small.server.close()


async def connect(small: Small) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", small.server.port)


async def head(reader: asyncio.StreamReader) -> bytes:
    """The first line of an answer; empty when the connection ends instead."""
    try:
        async with asyncio.timeout(60):
            return (await reader.readuntil(b"\r\n\r\n")).partition(b"\n")[0] + b"\n"
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""


async def busy_with(small: Small, count: int) -> None:
    """Waits until the server answers so many requests."""
    async with asyncio.timeout(60):
        while small.server.crowd.busy_count != count:
            await asyncio.sleep(0.01)


async def test_idle_connections_are_closed_first_and_busy_ones_never() -> None:
    async with small(3) as site:
        idle, first = await connect(site)
        first.write(GET)
        assert await head(idle) == OK
        working, second = await connect(site)
        second.write(GET.replace(b"health", b"busy"))
        await busy_with(site, 1)
        silent, third = await connect(site)
        newcomer, fourth = await connect(site)
        assert await head(silent) == b""
        fourth.write(GET)
        assert await head(newcomer) == OK
        _, fifth = await connect(site)
        assert await head(idle) == b""  # for longer than the newcomer
        fourth.write(GET)
        assert await head(newcomer) == OK
        site.done.set()
        assert await head(working) == OK
        for each in (first, second, third, fourth, fifth):
            each.close()


async def test_connections_with_an_incomplete_body_may_be_closed() -> None:
    async with small(2) as site:
        reader, writer = await connect(site)
        writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await asyncio.wait_for(site.owed.wait(), 60)
        assert site.server.crowd.busy_count == 0 and site.server.crowd.can_make_room
        writer.write(b"b")
        await asyncio.wait_for(site.has_body.wait(), 60)
        assert site.server.crowd.busy_count == 1 and not site.server.crowd.can_make_room
        site.done.set()
        assert await head(reader) == OK
        writer.close()


async def test_when_all_are_busy_new_ones_wait() -> None:
    async with small(2) as site:
        busy = []
        for count in (1, 2):
            busy.append(await connect(site))
            busy[-1][1].write(GET.replace(b"health", b"busy"))
            await busy_with(site, count)
        waiting = asyncio.create_task(ask(site.server.port))
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        site.done.set()
        for reader, _ in busy:
            assert await head(reader) == OK
        assert await waiting == OK
        for _, writer in busy:
            writer.close()


async def test_handshakes_that_do_not_go_on_make_room(tmp_path: Path) -> None:
    write(tmp_path, HOSTS)
    config = ServerConfig(
        ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem")
    )
    trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with small(4, https_context(config)) as site:
        silent = [await connect(site) for _ in range(12)]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", site.server.port, ssl=trust, server_hostname="localhost"
        )
        writer.write(GET)
        assert await head(reader) == OK
        assert await head(silent[0][0]) == b""
        for _, each in (*silent, (reader, writer)):
            each.close()


@asynccontextmanager
async def metrics_port(
    ready: Callable[[], tuple[bool, str]] = lambda: (True, ""),
) -> AsyncIterator[int]:
    server = await start_metrics_server(bind_metrics("127.0.0.1", 0), CollectorRegistry(), ready)
    try:
        yield server.port
    finally:
        await server.close()


async def test_silent_connections_at_a_metrics_port_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "HEADER_TIMEOUT", 0.3)
    monkeypatch.setattr(metrics_module, "_LIMITS", Limits(timeout_keep_alive=0.2))
    async with metrics_port() as port, asyncio.timeout(60):
        for said in (b"", b"GET /hea", GET):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            assert (await reader.read()).startswith(b"HTTP/1.1 200" if said == GET else b"")
            writer.close()


async def test_garbage_at_a_metrics_port_is_a_short_line_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    began = monotonic()
    async with metrics_port() as port:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01" * 2000, b"GET /" + b"a" * 16_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nno colon \x1b[31m" + b"b" * 8000 + b"\r\n\r\n",
        ) * 10:  # fmt: skip
            assert (await ask(port, garbage)).split()[1] == b"400"
    records = [each for each in caplog.records if each.name.startswith("pdserve")]
    assert 1 <= len(records) <= monotonic() - began + 2
    for record in records:
        assert record.levelno == logging.INFO and not record.exc_info
        assert len(record.getMessage()) < 300 and record.getMessage().isprintable()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_metric_that_cannot_be_read_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A defect, which no stranger can cause: with a traceback."""

    def broken() -> tuple[bool, str]:
        raise ValueError("a defect")

    async with metrics_port(broken) as port:
        assert (await ask(port, GET.replace(b"health", b"ready"))).split()[1] == b"500"
        assert b" 200 " in await ask(port)
    assert "a defect" in caplog.text
