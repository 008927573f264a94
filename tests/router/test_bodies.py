"""Bodies that are refused cost nothing, and those that are taken are inflated step by step; broken
ones are the client's fault."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fakes_pipeline import byte_level_folder
from http_site import Site, serve
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.http import server as server_module
from pdserve.common.obs.http import bind_metrics, start_metrics_server
from pdserve.router.api.auth import APIKeys
from pdserve.router.http import request as request_module
from pdserve.router.http.app import TRAFFIC
from pdserve.router.http.request import STEP, Inflater
from waiting import eventually

MIB = 2**20
BODY = b'{"prompt": "a"}'
HEAD = b"%b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: %b\r\n"
JSON = b"application/json"
KEY = "secret"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys(KEY)) as site:
        yield site


@asynccontextmanager
async def metrics_port() -> AsyncIterator[int]:
    bound = bind_metrics("127.0.0.1", 0)
    server = await start_metrics_server(bound, CollectorRegistry(), lambda: (True, ""))
    try:
        yield server.port
    finally:
        await server.close()


@cache
def bomb(kind: str, mebibytes: int) -> bytes:
    """So many zeros, all but the first 2 MiB of them as the same bytes over and over."""
    wbits = {"gzip": 31, "deflate": 15, "raw": -15}[kind]
    made = zlib.compressobj(9, zlib.DEFLATED, wbits)
    first, again = (made.compress(bytes(MIB)) + made.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * (mebibytes - 1)


def head(
    line: str, *, key: str = KEY, kind: bytes = JSON, encoding: str = "gzip", size: int | None
) -> bytes:
    """`size` of None: chunked."""
    length = b"Transfer-Encoding: chunked" if size is None else b"Content-Length: %d" % size
    start = HEAD % (line.encode(), key.encode(), kind)
    return b"%bContent-Encoding: %b\r\n%b\r\n\r\n" % (start, encoding.encode(), length)


async def status(reader: asyncio.StreamReader) -> int:
    """Returns that of the next answer, whose body is read."""
    return (await answer(reader))[0]


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, header and body."""
    async with asyncio.timeout(60):
        got = await reader.readuntil(b"\r\n\r\n")
        length = int(got.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        return int(got.split()[1]), got, await reader.readexactly(length)


# ---- gzip bombs -----------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], int]] = [
    ({"line": "POST /v1/completions", "key": "other"}, 401),
    ({"line": "POST /nothing"}, 404),
    ({"line": "PUT /v1/completions"}, 405),
    ({"line": "POST /v1/completions"}, 413),
    ({"line": "POST /v1/completions", "kind": b"text/plain"}, 415),
    ({"line": "GET /health", "key": ""}, 200),
    ({"line": "POST /v1/completions", "key": "", "encoding": "deflate"}, 401),
]


async def bombed(port: int, request: dict[str, Any], expected: int, bombs: int = 4) -> None:
    """Bombs on sockets that stay open; meanwhile the loop has its turns and others their answers.
    A turn's time is the processor's, which other processes do not lengthen."""
    body = bomb(request.get("encoding", "gzip"), 512)
    longest = 0.0

    async def turns() -> None:
        nonlocal longest
        before = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            longest, before = max(longest, now - before), now

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(**request, size=len(body)) + body)
        assert await status(reader) == expected
        reader, other = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            other.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await status(reader) == 200
        other.close()
        writer.close()

    watching = asyncio.create_task(turns())
    await asyncio.gather(*(one() for _ in range(bombs)))
    watching.cancel()
    assert longest < 0.5, f"one turn of the event loop took {longest:.2f} s"


async def test_a_refused_gzip_bomb_is_not_inflated(site: Site) -> None:
    for request, expected in REFUSALS:
        await bombed(site.port, request, expected)


async def test_a_gzip_bomb_at_a_metrics_port_is_not_inflated() -> None:
    async with metrics_port() as port:
        for line in ("GET /health", "GET /metrics", "POST /nothing"):
            await bombed(port, {"line": line}, 404 if "nothing" in line else 200)


async def test_a_chunked_bomb_is_inflated_up_to_the_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has a key."""
    inflated = 0
    steps = Inflater.steps

    def counted(self: Inflater, data: bytes) -> object:
        nonlocal inflated
        for piece in steps(self, data):
            inflated += len(piece)
            yield piece

    monkeypatch.setattr(Inflater, "steps", counted)
    body = bomb("gzip", 16)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head("POST /v1/completions", size=None) + b"%x\r\n" % len(body) + body)
    assert await status(reader) == 413
    assert inflated <= 64 * 1024 + STEP  # the site's limit
    writer.close()


# ---- bodies that never end, and what follows refused ones -----------------------------------


@pytest.mark.parametrize("line", ["GET /health", "POST /nothing", "PUT /v1/completions"])
async def test_an_endless_body_is_answered_and_hung_up_on(
    site: Site, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LINGER", 0.3)
    async with metrics_port() as port:
        for each in (site.port, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", each)
            writer.write(head(line, size=None) + b"5\r\nabcde\r\n")
            code, header, _ = await answer(reader)
            assert code in (200, 404, 405) and b"connection: close" in header.lower()
            with pytest.raises(ConnectionError):  # though it goes on
                async with asyncio.timeout(60):
                    while True:
                        writer.write(b"5\r\nabcde\r\n")
                        await writer.drain()
                        await asyncio.sleep(0.01)
            writer.close()


async def test_after_a_refused_body_nothing_on_the_connection_is_a_request(site: Site) -> None:
    """The rest of the stream may be a body's bytes that look like one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(head("POST /nothing", size=10 * MIB) + smuggled)
    assert await status(reader) == 404
    writer.write(bytes(10 * MIB - len(smuggled)) + smuggled)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_a_small_refused_body_keeps_the_connection(site: Site) -> None:
    """Also when it comes after the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    for _ in range(3):
        writer.write(head("POST /nothing", size=1000))
        assert await status(reader) == 404
        writer.write(bytes(1000))
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await status(reader) == 200
    writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_a_client_that_sends_all_of_a_refused_body_still_gets_the_answer(
    site: Site, path: str
) -> None:
    """A socket closed with bytes unread would reset the connection under it."""

    def ask() -> tuple[int, str]:
        client = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        client.request("POST", path, body=bytes(20 * MIB), headers={"Content-Type": "a/b"})
        response = client.getresponse()
        got = response.status, json.loads(response.read())["error"]["type"]
        client.close()
        return got

    assert await asyncio.to_thread(ask) == (401, "authentication_error")


async def test_half_a_body_makes_room_for_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crowd of them would take all connections for as long as bodies may take."""
    monkeypatch.setattr(site.server.web_server.crowd, "_most", 3)
    start = HEAD % (b"POST /v1/completions", KEY.encode(), JSON)
    halves = []
    for count in range(1, 4):
        halves.append(await asyncio.open_connection("127.0.0.1", site.port))
        halves[-1][1].write(start + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:5])
        await eventually(lambda count=count: len(site.server.app[TRAFFIC].tasks) == count)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await status(reader) == 200
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await halves[0][0].readexactly(1)
    for half, rest in halves[1:]:
        rest.write(BODY[5:])
        assert await status(half) == 200
    for _, each in (*halves, (reader, writer)):
        each.close()


# ---- Expect: 100-continue -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("POST /v1/completions", "other", 401),
        ("POST /nothing", KEY, 404),
        ("PUT /v1/completions", KEY, 405),
        ("GET /health", KEY, 200),
    ],
)
async def test_a_refused_body_is_not_asked_for(
    site: Site, line: str, key: str, expected: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    start = HEAD % (line.encode(), key.encode(), JSON)
    writer.write(start + b"Expect: 100-continue\r\nContent-Length: 20\r\n\r\n")
    code, header, _ = await answer(reader)
    assert code == expected and b"connection: close" in header.lower()
    writer.close()


async def test_a_body_that_is_wanted_is_asked_for(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    start = HEAD % (b"POST /v1/completions", KEY.encode(), JSON)
    for _ in range(2):
        writer.write(start + b"Expect: 100-Continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert await status(reader) == 100
        writer.write(BODY)
        assert await status(reader) == 200
    writer.write(start + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
    assert await status(reader) == 413  # at once
    writer.close()


async def test_an_unknown_expectation_is_an_error(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n")
    code, head, body = await answer(reader)
    error = json.loads(body)["error"]
    assert code == 417 and b"application/json" in head
    assert error["message"] == "Expect: magic is unknown: send 100-continue, or no Expect"
    assert (error["type"], error["code"]) == ("invalid_request_error", "expectation_failed")
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await status(reader) == 200
    writer.close()


# ---- compressed bodies ----------------------------------------------------------------------


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


async def sent(site: Site, encoding: str, body: bytes) -> tuple[int, str, bool]:
    """Status, what is wrong, and whether the connection stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head("POST /v1/completions", encoding=encoding, size=len(body)) + body)
    code, _, body = await answer(reader)
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    is_open = (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    return code, json.loads(body).get("error", {}).get("message", ""), is_open


COMPRESSED = {
    "no name": ("", BODY),
    "identity": ("identity", BODY),
    "gzip": ("GZIP", gzip.compress(BODY)),
    "two members": ("gzip", gzip.compress(BODY[:5]) + gzip.compress(BODY[5:])),
    "zlib": ("deflate", zlib.compress(BODY)),
    "bare deflate": ("deflate", raw_deflate(BODY)),
}
BROKEN = {
    "no gzip": ("gzip", b"abcdefgh" * 4),
    "cut off": ("gzip", gzip.compress(BODY)[:-1]),
    "another checksum": ("gzip", gzip.compress(BODY)[:-8] + bytes(8)),
    "something behind it": ("gzip", gzip.compress(BODY) + b"garbage"),
    "zlib cut off": ("deflate", zlib.compress(BODY)[:-1]),
    "zlib twice": ("deflate", zlib.compress(BODY) * 2),
    "no deflate": ("deflate", b"\x07 no block has this type"),
}


async def test_bodies_may_be_compressed(site: Site) -> None:
    for name, (encoding, body) in COMPRESSED.items():
        assert await sent(site, encoding, body) == (200, "", True), name


async def test_broken_compression_is_the_clients_fault(site: Site) -> None:
    for name, (encoding, body) in BROKEN.items():
        code, message, is_open = await sent(site, encoding, body)
        assert (code, is_open) == (400, True), name
        assert message.startswith(f"the body cannot be read as {encoding}: "), name


async def test_after_an_unknown_encoding_the_connection_goes_on(site: Site) -> None:
    for encoding in ("snappy", "gzip, gzip", "zstd", "br", "gzip\r\nContent-Encoding: gzip"):
        code, message, is_open = await sent(site, encoding, gzip.compress(BODY))
        assert (code, is_open) == (415, True) and "gzip or deflate" in message, encoding


async def test_an_empty_compressed_body_is_an_empty_body(site: Site) -> None:
    for body in (b"", gzip.compress(b"")):
        code, message, _ = await sent(site, "gzip", body)
        assert code == 400 and "JSON" in message


@pytest.mark.parametrize("size", [0, 1, STEP - 1, STEP, STEP + 1, 10 * STEP])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_steps_are_small_and_lose_nothing(encoding: str, size: int) -> None:
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    for data in (bytes(size), bytes(i * i % 251 for i in range(size))):
        for at_a_time in (7, 10**6):
            inflater, compressed = Inflater(encoding), compress(data)
            pieces = [
                piece
                for start in range(0, len(compressed), at_a_time)
                for piece in inflater.steps(compressed[start : start + at_a_time])
            ]
            inflater.end()
            assert b"".join(pieces) == data and max(map(len, pieces), default=0) <= STEP


def test_the_members_of_a_gzip_body_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_MEMBERS", 3)
    for count, is_taken in ((3, True), (4, False)):
        inflater = Inflater("gzip")
        if is_taken:
            assert b"".join(inflater.steps(gzip.compress(b"a") * count)) == b"a" * count
        else:
            with pytest.raises(InvalidRequest, match="too much follows"):
                list(inflater.steps(gzip.compress(b"a") * count))


async def test_compressed_bytes_that_inflate_to_nothing_count(site: Site) -> None:
    """Empty blocks without end."""
    made = zlib.compressobj(wbits=31)
    start = made.compress(b"") + made.flush(zlib.Z_FULL_FLUSH)
    again = made.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"
    body = start + again * (70_000 // len(again))
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head("POST /v1/completions", size=None) + b"%x\r\n" % len(body) + body)
    assert await status(reader) == 413
    writer.close()


async def test_the_rate_of_a_body_is_that_of_the_wire(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drops that inflate a thousandfold are drops."""
    monkeypatch.setattr(request_module, "GRACE", 0.3)
    body = bomb("gzip", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head("POST /v1/completions", size=len(body)))
    answered = asyncio.create_task(status(reader))
    for byte in body[:40]:  # a KiB or two
        if answered.done():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
    assert await answered == 408
    writer.close()
