"""Jobs with keys on a decode node: who keeps them, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.request import TokenEvent
from pdserve.common.core.sampling import SampledToken
from pdserve.common.rpc.tokens import JobTokens
from pdserve.decode_node import orphans as module
from pdserve.decode_node.orphans import KeptJob, Orphans
from pdserve.decode_node.router_streams import JobWriter, RouterStream
from transfers import awake_time, go_on
from waiting import eventually


class Session:
    """Says a token whenever it is told to, until it fails."""

    def __init__(self, has_kv: bool = True) -> None:
        self.has_kv = has_kv
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, local_prefill: bool, writer: JobWriter) -> None:
        self.say = lambda: writer.tokens(0, TokenEvent(0, (SampledToken(7),)))
        await self._failure

    def fail(self, error: PdserveError) -> None:
        self._failure.set_exception(error)


class Node:
    """Orphans, and the calls and sessions that there are."""

    def __init__(self) -> None:
        self.closed: list[Any] = []
        self.orphans = Orphans(30.0, self.closed.append, asyncio.ensure_future)

    def begin(self, session: Session, key: bytes = b"k") -> KeptJob:
        job = self.orphans.begin(key, session, False)  # type: ignore[arg-type]
        assert job is not None
        return job

    async def die(self, call: asyncio.Task[None], stream: RouterStream) -> None:
        """The router that made the call dies."""
        call.cancel()
        await asyncio.sleep(0)
        stream.close()
        await asyncio.wait([call])
        await asyncio.sleep(0.01)


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(module, "NOTICE", 0.05)
    yield Node()


async def call(job: KeptJob, stream: RouterStream, number: int = 1) -> asyncio.Task[None]:
    task = asyncio.create_task(job.serve(stream, number))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_the_next_router_hears_all_of_it(node: Node) -> None:
    first, second, session = RouterStream(), RouterStream(), Session()
    job = node.begin(session)
    run = await call(job, first)
    session.say()
    await node.die(run, first)
    assert job.is_orphan and node.orphans.adopt(b"k") is job
    session.say()
    run = await call(job, second, number=9)
    session.say()
    assert not job.is_orphan
    said = second._take()
    assert [each.job for each in said] == [9, 9, 9]
    assert all(isinstance(each, JobTokens) and each.token_ids == (7,) for each in said)
    with pytest.raises(NodeError, match="not here"):  # it has a router
        node.orphans.adopt(b"k")
    session.fail(NodeError("over"))
    await run
    assert node.orphans.find(b"k") is None and node.closed == [session]


async def test_the_lease_ends_with_the_adoption(node: Node) -> None:
    with awake_time():
        first, session = RouterStream(), Session()
        job = node.begin(session)
        run = await call(job, first)
        session.say()
        await node.die(run, first)
        assert job.is_orphan
        run = await call(job, RouterStream())
        await go_on(2 * node.orphans.lease)
        assert not node.closed and not run.done()
        session.fail(NodeError("over"))
        await run


async def test_what_a_living_router_gives_up_ends(node: Node) -> None:
    session, stream = Session(), RouterStream()
    run = await call(node.begin(session), stream)
    run.cancel()
    await eventually(lambda: node.closed == [session])
    assert node.orphans.find(b"k") is None


async def test_a_stream_that_is_lost_alone_fails_its_jobs(node: Node) -> None:
    """Its router lives, and goes on elsewhere."""
    session, stream = Session(), RouterStream()
    run = await call(node.begin(session), stream)
    stream.close()
    await asyncio.wait_for(run, 5)
    assert node.closed == [session]


@pytest.mark.parametrize("why", ["no KV", "too many", "too much", "lapsed"])
async def test_what_is_no_orphan_ends_with_its_router(
    node: Node, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    session, stream = Session(has_kv=why != "no KV"), RouterStream()
    if why == "too many":
        monkeypatch.setattr(module, "MAX_ORPHANS", 0)
    if why == "too much":
        monkeypatch.setattr(module, "MAX_KEPT", 0)
    if why == "lapsed":
        node.orphans.lease = 0.05
    run = await call(node.begin(session), stream)
    session.say()
    await node.die(run, stream)
    await eventually(lambda: node.closed == [session])
    assert node.orphans.find(b"k") is None
