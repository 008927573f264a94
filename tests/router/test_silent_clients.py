"""Clients that do not read, do not write, or do either drop by drop: they hold nothing for long."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from fakes_pipeline import byte_level_folder, served_model
from paths import MODELS
from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken
from pdserve.common.http import connection as connection_module
from pdserve.common.http.connection import Connection, Crowd, Limits
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.grpc.service import InferenceServicer
from pdserve.router.http import request as request_module
from pdserve.router.http.app import make_app
from pdserve.router.http.server import HTTPServer
from pdserve.router.requests import generation as generation_module
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Outlet,
    Put,
    TextDelta,
    Updates,
    generate,
)
from pdserve.router.requests.timelines import Timelines
from waiting import eventually

MODEL = MODELS / "llama-gqa"
PIECE = "x" * 50_000


class Talker:
    """Says a lot: more than all buffers between it and a client hold."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.piece = lambda number: PIECE
        self.open = 0
        self.timelines = Timelines(kept=8)
        self.finished = asyncio.Event()  # without having been closed
        self.closed = asyncio.Event()

    def check_room(self, client: str, tokens: int = 1) -> None:
        """It has room for all."""

    def generate(
        self, requests: Sequence[GenerationRequest], outlet: Outlet | None = None
    ) -> AsyncGenerator[Updates, None]:
        return generate(requests, self._serve, outlet)

    async def _serve(self, request: GenerationRequest, put: Put) -> GenerationStats:
        self.open += 1
        try:
            for number in range(self.pieces):
                await asyncio.sleep(0)
                put(TextDelta(0, self.piece(number), (SampledToken(1),)))
            put(TextDelta(0, "", (SampledToken(2),), FinishReason.STOP))
            self.finished.set()
            return GenerationStats(1, self.pieces, 0, Timeline())
        finally:
            self.open -= 1
            self.closed.set()

    def ready(self) -> tuple[bool, str]:
        return True, ""

    def cluster(self) -> dict[str, Any]:
        return {}


def serving_of(talker: Talker, folder: Path) -> AppState:
    tokenizer = Tokenizer.from_folder(byte_level_folder(folder))
    return AppState(pipeline=talker, served=served_model(tokenizer))


@asynccontextmanager
async def serving(folder: Path, talker: Talker, **limits: float) -> AsyncIterator[HTTPServer]:
    app = make_app(serving_of(talker, folder), CollectorRegistry(), 2**20)
    server = await HTTPServer.start(app, "127.0.0.1", 0, limits=Limits(**limits))
    try:
        yield server
    finally:
        await server.stop(0)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client whose own buffers are small, and that reads only when it is told to."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2048)
    return reader, writer


def ask(writer: asyncio.StreamWriter, version: str = "1.1", **fields: Any) -> None:
    body = json.dumps({"prompt": "a", **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def ends(reader: asyncio.StreamReader) -> bytes:
    """Returns what comes until the server closes the connection."""
    try:
        async with asyncio.timeout(60):
            return await reader.read(-1)
    except ConnectionError:
        return b""


# ---- clients that ask without a pause -------------------------------------------------------


async def test_pipelined_requests_do_not_block_the_event_loop(tmp_path: Path) -> None:
    turns, asked = 0, Counter[int]()  # of this task; requests in each
    talker = Talker(1)
    talker.ready = lambda: (asked.update([turns]), (True, ""))[1]  # type: ignore[method-assign]
    async with serving(tmp_path, talker) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n" * 99)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = asyncio.create_task(ends(reader))
        while not answers.done():
            await asyncio.sleep(0)
            turns += 1
        assert answers.result().count(b"HTTP/1.1 200") == asked.total() == 100
        assert max(asked.values()) <= 2
        writer.close()


# ---- clients that do not read ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_slot_is_free_when_the_nodes_have_finished_and_the_client_does_not_read(
    tmp_path: Path, stream: bool
) -> None:
    talker = Talker(400)  # 20 MB
    async with serving(tmp_path, talker, write_timeout=60) as server:
        reader, writer = await connect(server.port)
        ask(writer, stream=stream)
        async with asyncio.timeout(60):
            await talker.finished.wait()
        assert talker.open == 0  # its slot is free; no byte was read
        received = 0
        async with asyncio.timeout(60):
            while received < 400 * len(PIECE):  # and nothing is lost
                received += (await reader.read(2**16)).count(b"x")
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_hung_up_on(tmp_path: Path, stream: bool) -> None:
    talker = Talker(400)
    async with serving(tmp_path, talker, write_timeout=0.2) as server:
        reader, writer = await connect(server.port)
        ask(writer, stream=stream)
        await eventually(lambda: server.web_server.crowd)
        await eventually(lambda: not server.web_server.crowd)
        assert (await ends(reader)).count(b"x") < 400 * len(PIECE)
        assert not talker.open
        writer.close()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_reads_by_fits_and_starts_gets_all(
    tmp_path: Path, version: str
) -> None:
    """Some events are written as they come, some when it takes more again: none out of order."""
    talker = Talker(400)
    talker.piece = lambda number: f"<{number}>" + 2000 * "x"
    async with serving(tmp_path, talker) as server:
        reader, writer = await connect(server.port)
        ask(writer, version, stream=True)
        got = b""
        while b"[DONE]" not in got and (data := await reader.read(2**16)):
            got += data
            await asyncio.sleep(0.01 if len(got) % 3 else 0)
        writer.close()
    # Chunks' sizes stand between the events.
    assert [int(each) for each in re.findall(rb"<(\d+)>", got)] == list(range(400))
    assert got.count(b"x" * 2000) == 400 and got.count(b"data: ") == 402
    assert (b"Transfer-Encoding: chunked" in got) == (version == "1.1")


async def test_an_endless_answer_to_a_client_that_does_not_read_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "MAX_BEHIND", 500)
    talker = Talker(10**9)
    async with serving(tmp_path, talker, write_timeout=60) as server:
        _, writer = await connect(server.port)
        ask(writer, stream=True)
        async with asyncio.timeout(60):
            await talker.closed.wait()
        assert not talker.finished.is_set()
        writer.close()


@pytest.mark.parametrize("timeout", [0.2, 0.0])
async def test_a_grpc_client_that_does_not_read_is_cancelled(
    tmp_path: Path, timeout: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the first message takes too long already."""
    caplog.set_level("INFO")
    server = grpc.aio.server()
    talker = Talker(400)
    service = InferenceServicer(serving_of(talker, tmp_path), timeout)
    pb_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a"))
            await eventually(lambda: "did not read for" in caplog.text)
            await eventually(talker.closed.is_set)  # its place is free
            with pytest.raises(grpc.aio.AioRpcError, match="did not read"):
                async with asyncio.timeout(60):
                    while await call.read() is not grpc.aio.EOF:
                        pass
    finally:
        await server.stop(0)


# ---- connections that say nothing -----------------------------------------------------------


async def test_idle_connections_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEADER_TIMEOUT", 0.3)
    async with serving(tmp_path, Talker(1), timeout_keep_alive=0.2) as server:
        silent, _ = await connect(server.port)
        asked, writer = await connect(server.port)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert (await ends(asked)).count(b"HTTP/1.1 200") == 2
        assert await ends(silent) == b""


async def test_a_router_that_stood_still_keeps_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot know yet what waits in them."""
    looked, check = asyncio.Event(), Connection.check
    monkeypatch.setattr(Connection, "check", lambda *args: (check(*args), looked.set()))
    loop, skipped = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + skipped)
    async with serving(tmp_path, Talker(1), timeout_keep_alive=1) as server:
        reader, writer = await connect(server.port)
        request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(request)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        looked.clear()
        skipped = 1.6  # as if the loop itself had stood still
        await looked.wait()
        writer.write(request)
        assert (await ends(reader)).count(b"HTTP/1.1 200") == 1


async def test_a_header_drop_by_drop_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEADER_TIMEOUT", 0.3)
    async with serving(tmp_path, Talker(1), timeout_keep_alive=0.2) as server:
        reader, writer = await connect(server.port)
        ended = asyncio.create_task(ends(reader))
        writer.write(b"GET /version HTTP/1.1\r\n")
        async with asyncio.timeout(60):
            while not ended.done():
                writer.write(b"X-Drop: 1\r\n")
                await asyncio.sleep(0.02)
        assert await ended == b""
        writer.close()


async def test_a_body_drop_by_drop_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "GRACE", 0.3)
    async with serving(tmp_path, Talker(1)) as server:
        reader, writer = await connect(server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000\r\n\r\n"
        )
        answered = asyncio.create_task(reader.readuntil(b"\r\n"))
        async with asyncio.timeout(60):
            while not answered.done():
                writer.write(b" ")
                await asyncio.sleep(0.02)
        assert b"408" in await answered
        writer.close()


# ---- one connection, with a clock of our own ------------------------------------------------


class Wire(asyncio.Transport):
    """A transport whose client takes what the test says."""

    def __init__(self, host: str = "") -> None:
        super().__init__()
        self.unsent, self.ended, self.host = 0, "", host

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.host, 1) if name == "peername" else default

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Clocked:
    def __init__(self, keep_alive: float = 5) -> None:
        self.time, self.wire = 0.0, Wire()
        limits = Limits(keep_alive, 30)
        self.connection = Connection(asyncio.Protocol(), limits, Crowd(9, lambda: self.time))
        self.connection.connection_made(self.wire)

    def look(self, after: float) -> str:
        self.time += after
        self.connection.check()
        return self.wire.ended


async def test_a_slow_reader_is_not_hung_up_on() -> None:
    clocked = Clocked()
    with clocked.connection.answering():
        assert clocked.look(1000) == ""  # a long prompt: nothing to send yet
        clocked.wire.unsent = 70_000
        clocked.connection.pause_writing()
        for _ in range(10):
            clocked.wire.unsent -= 1
            assert clocked.look(29) == ""
        assert clocked.look(29) == ""
        assert clocked.look(1) == "aborted"


def test_the_host_with_most_that_is_not_taken_loses_its_largest_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes a byte now and then, and is never late."""
    monkeypatch.setattr(connection_module, "MAX_UNSENT", 1000)
    crowd = Crowd(99, lambda: 0.0)
    wires = {name: Wire(name[0]) for name in ("a1", "a2", "a3", "b1", "c1")}
    for wire in wires.values():
        Connection(asyncio.Protocol(), Limits(), crowd).connection_made(wire)
    unsent = {"a1": 300, "a2": 250, "a3": 200, "b1": 400, "c1": 0}
    for name, nbytes in unsent.items():
        wires[name].unsent = nbytes
    crowd.bound_unsent()  # 150 too many; `a` has 750
    assert [name for name, wire in wires.items() if wire.ended] == ["a1"]
    assert wires["a1"].ended == "aborted"
    wires["a1"].unsent = 0
    crowd.bound_unsent()
    assert sum(bool(wire.ended) for wire in wires.values()) == 1


async def test_in_a_crowd_idle_connections_have_less_time() -> None:
    clocked = Clocked(keep_alive=75)
    with clocked.connection.answering():
        pass
    clocked.time += 6
    clocked.connection.check()
    assert clocked.wire.ended == ""
    clocked.connection.check(is_crowded=True)
    assert clocked.wire.ended == "closed"


async def test_the_rest_of_an_answer_may_take_as_long() -> None:
    clocked = Clocked()
    with clocked.connection.answering():
        clocked.wire.unsent = 100
    assert clocked.look(29) == ""
    clocked.wire.unsent = 50
    assert clocked.look(29) == ""
    clocked.wire.unsent = 0
    assert clocked.look(29) == ""  # idle from now on
    assert clocked.look(4.9) == ""
    assert clocked.look(0.1) == "closed"
    clocked.wire.unsent = 10  # the goodbye of TLS, for one who does not read it
    clocked.look(1)
    assert clocked.look(30) == "aborted"
