"""Two routers behind HAProxy, or known to clients: one dies; all are replaced, with the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from balancer import balanced
from benchmarks.chaos import NODE_OPTIONS
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


def text_of(chunks: Iterable[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_router_dies_behind_haproxy(cluster: WarmCluster, behind: WarmCluster) -> None:
    """Streams with ids go on through the other one, at the same address. What was not answered yet
    HAProxy asks there, or the client does: HAProxy 2.6 answers some of it with 502."""
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
    for node in (*cluster.names("prefill"), *cluster.names("decode")):
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
    cluster.wait_idle()


def test_a_router_and_a_node_are_replaced(cluster: WarmCluster) -> None:
    """Clients know both routers."""
    replace(cluster, ["router-2"], ["decode"], cluster)


@pytest.mark.slow  # its fast twin is the one above
@pytest.mark.parametrize("plain", [False, True])
def test_everything_is_replaced(cluster: WarmCluster, plain: bool) -> None:
    """Clients know both routers, or one address of HAProxy and nothing of routers."""
    everything = [*cluster.routers], ["prefill", "decode"]
    if not plain:
        replace(cluster, *everything, cluster)
        return
    with balanced(cluster) as asked:
        replace(cluster, *everything, asked)
