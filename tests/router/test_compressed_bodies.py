"""Compressed bodies are inflated step by step, and broken ones are the client's fault."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from test_http_api import Site, serve
from test_refused_bodies import BODY, KEY, answer, bomb, head, status

from fakes_pipeline import byte_level_folder
from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.auth import APIKeys
from pdserve.router.http import request as request_module
from pdserve.router.http.request import STEP, Inflater


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys(KEY)) as site:
        yield site


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


async def test_what_inflates_to_nothing_counts_as_it_comes(site: Site) -> None:
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
