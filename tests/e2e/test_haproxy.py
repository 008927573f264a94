"""Two routers behind HAProxy, or known to clients: one dies; all are replaced, with the nodes."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from balancer import balanced, config
from benchmarks.chaos import NODE_OPTIONS
from benchmarks.fleet import free_port
from benchmarks.soak.asks import make_asks
from benchmarks.soak.faults import ready, restart
from benchmarks.soak.load import clients
from callers import fresh_prompt
from pdserve.cli import doctor
from pdserve.client.resuming import ResumingClient
from waiting import eventually
from warm import WarmCluster

MODEL = "llama-gqa"
ASKS = make_asks(21, seed=0, max_tokens=(6, 20), vocab_size=512)  # each way with each style
IN_FLIGHT = 8
KEY = {"cluster_key": "k" * 32}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    router = {"max_client_share": 1, **KEY}
    with WarmCluster(MODEL, routers=2, decode=0, router=router, **NODE_OPTIONS, **KEY) as made:
        made.start_held("decode")
        made.wait_nodes()
        yield made


@pytest.fixture(scope="module")
def behind(cluster: WarmCluster) -> Iterator[WarmCluster]:
    with balanced(cluster) as asked:
        yield asked


def test_haproxy_keeps_no_event_back(
    behind: WarmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor.main(["--cluster", behind.url])
    assert code == 0, capsys.readouterr().out


async def test_haproxy_retries_what_a_router_does_not_answer(tmp_path: Path) -> None:
    """A router that closes or resets the connection counts, too, however the client sends its
    request."""
    async with asked_through_haproxy(tmp_path, breaking, answering) as (port, asked):
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(b"{}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        assert asked[breaking] and asked[answering] >= 40


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()


async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes as a router that dies."""


@asynccontextmanager
async def asked_through_haproxy(
    folder: Path, *answers: Answer
) -> AsyncIterator[tuple[int, Counter[Answer]]]:
    """Servers that are ready and answer other requests so; yields HAProxy's port, and how many
    each was asked."""
    asked: Counter[Answer] = Counter()

    async def serve(answer: Answer, reader: Any, writer: asyncio.StreamWriter) -> None:
        is_check = (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready")
        asked[answer] += not is_check
        await (answering if is_check else answer)(reader, writer)
        writer.close()

    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    ports, file = {"http": free_port(), "grpc": free_port()}, folder / "haproxy.cfg"
    async with AsyncExitStack() as stack:
        servers = [await asyncio.start_server(partial(serve, a), "127.0.0.1", 0) for a in answers]
        routers = [dict.fromkeys(ports, each.sockets[0].getsockname()[1]) for each in servers]
        for each in servers:
            await stack.enter_async_context(each)
        file.write_text(config(routers, ports))
        process = await asyncio.create_subprocess_exec(program, "-db", "-f", str(file))
        try:
            async with asyncio.timeout(60):
                while not await _listens(ports["http"]):
                    await asyncio.sleep(0.01)
            yield ports["http"], asked
        finally:
            process.terminate()
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def text_of(chunks: Iterable[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.slow
def test_a_router_dies_behind_haproxy(cluster: WarmCluster, behind: WarmCluster) -> None:
    """Streams with ids go on through the other one, at the same address. What was not answered yet
    HAProxy asks there."""
    body = {"prompt": fresh_prompt(20), "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    client = ResumingClient([behind.url])
    expected = text_of(client.stream(COMPLETIONS, body))
    streams = [client.stream(COMPLETIONS, body) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with cluster.standing_still("decode"):
            texts = [text_of(islice(stream, 1)) for stream in streams]
            whole = [pool.submit(client.complete, COMPLETIONS, body) for _ in range(4)]
            cluster.wait_for(lambda: sum(running(cluster, name) for name in cluster.routers) == 8)
            cluster.kill("router")
        answers = [each.result() for each in whole]
    texts = [text + text_of(stream) for text, stream in zip(texts, streams, strict=True)]
    assert {text_of([answer]) for answer in answers} == {*texts} == {expected}
    cluster.start_router()
    cluster.wait_nodes()
    cluster.wait_idle()


def running(cluster: WarmCluster, router: str) -> int:
    return int(cluster.state(router)["running"])


# ---- a rolling upgrade ----


async def replace_router(cluster: WarmCluster, name: str) -> None:
    """It drains and ends; then another one starts at its place, and has all nodes."""
    pid = cluster.drain(name)
    async with asyncio.timeout(90):
        while await asyncio.to_thread(cluster.exit_code, pid) is None:
            await asyncio.sleep(0.05)
    cluster.start_router(name=name)
    for node in cluster.pids.keys() - cluster.routers.keys():
        await ready(cluster, node)
    await eventually(lambda: all_up(cluster))  # before the next one drains


def all_up(cluster: WarmCluster) -> bool:
    """Whether every HAProxy sends requests to all routers, by what they log."""
    log = cluster.log()
    return log.count(" is UP, reason: ") == log.count(" is DOWN, reason: ")


async def upgrade(cluster: WarmCluster, routers: Sequence[str], roles: Sequence[str]) -> None:
    for name in routers:
        await replace_router(cluster, name)
    for role in roles:
        for node in cluster.names(role):
            await restart(cluster, node, 0)


def replace(
    cluster: WarmCluster, routers: Sequence[str], roles: Sequence[str], asked: WarmCluster
) -> None:
    """One process after the other, under the load of clients of `asked`, who see nothing of it."""
    old = {pid for name, pid in cluster.pids.items() if name.startswith((*routers, *roles))}

    async def run() -> None:
        async with clients(asked, ASKS, [*asked.routers]) as load:
            await load.learn()
            tally = await load.during(upgrade(cluster, routers, roles), IN_FLIGHT)
        failed = [*tally.lost, *tally.wrong, *tally.hung]
        assert not failed and not tally.router_died, f"{failed}\n{cluster.log()[-6000:]}"
        assert tally.completed >= IN_FLIGHT

    asyncio.run(run())
    assert cluster.crashed() == [] and old.isdisjoint(cluster.pids.values())
    assert "Traceback" not in cluster.log()
    cluster.wait_idle()


@pytest.mark.slow
def test_a_router_and_a_node_are_replaced(cluster: WarmCluster) -> None:
    """Clients know both routers."""
    replace(cluster, ["router-2"], ["decode"], cluster)


@pytest.mark.slow  # its fast twin is the one above
@pytest.mark.parametrize("plain", [False, True])
def test_everything_is_replaced(cluster: WarmCluster, plain: bool) -> None:
    """Clients know both routers, or one address of HAProxy and nothing of routers."""
    while len(cluster.names("both")) < 2:
        cluster.start_node("both")
    cluster.wait_nodes()
    everything = [*cluster.routers], ["prefill", "decode", "both"]
    if not plain:
        replace(cluster, *everything, cluster)
        return
    with balanced(cluster) as asked:
        replace(cluster, *everything, asked)
