"""Jobs with keys on a decode node: who reads them, and how long they are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.request import TokenEvent
from pdserve.common.core.sampling import SampledToken
from pdserve.common.rpc.tokens import JobTokens
from pdserve.decode_node import kept_jobs as module
from pdserve.decode_node.kept_jobs import KeptJob, KeptJobs
from pdserve.decode_node.router_streams import JobWriter, RouterStream
from transfers import awake_time, go_on
from waiting import eventually


class Session:
    """Says a token whenever it is told to, until it ends."""

    def __init__(self, has_kv: bool = True, client: str = "c") -> None:
        self.has_kv = has_kv
        self.client = client
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, local_prefill: bool, writer: JobWriter) -> None:
        self.say = lambda: writer.tokens(0, TokenEvent(0, (SampledToken(7),)))
        await self._outcome

    def fail(self, error: PdserveError) -> None:
        self._outcome.set_exception(error)

    def end(self) -> None:
        """All is said."""
        self._outcome.set_result(None)


class Node:
    """Kept jobs, and the sessions that were closed."""

    def __init__(self) -> None:
        self.closed: list[Any] = []
        self.jobs = KeptJobs(30.0, self.closed.append, asyncio.ensure_future)

    def begin(self, session: Session, key: bytes = b"k") -> KeptJob:
        job = self.jobs.begin(key, session, False)  # type: ignore[arg-type]
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


def tokens(stream: RouterStream) -> list[int]:
    """The jobs of the tokens that a router can read now."""
    return [each.job for each in stream._take() if isinstance(each, JobTokens)]


def is_kept(node: Node, key: bytes = b"k") -> bool:
    try:
        node.jobs.join(key)
    except NodeError:
        return False
    return True


async def test_the_next_router_hears_all_of_it(node: Node) -> None:
    first, second, session = RouterStream(), RouterStream(), Session()
    job = node.begin(session)
    run = await call(job, first)
    session.say()
    await node.die(run, first)
    await eventually(lambda: job.is_orphan)
    assert node.jobs.join(b"k") is job
    session.say()
    run = await call(job, second, number=9)
    session.say()
    assert not job.is_orphan
    assert tokens(second) == [9, 9, 9]
    session.fail(NodeError("over"))
    await run
    assert not is_kept(node) and node.closed == [session]


async def test_the_lease_ends_with_the_adoption(node: Node) -> None:
    with awake_time():
        first, session = RouterStream(), Session()
        job = node.begin(session)
        run = await call(job, first)
        session.say()
        await node.die(run, first)
        await eventually(lambda: job.is_orphan)
        run = await call(job, RouterStream())
        await go_on(2 * node.jobs.lease)
        assert not node.closed and not run.done()
        session.fail(NodeError("over"))
        await run


async def test_two_routers_read_one_job(node: Node) -> None:
    """Each hears all of it once; either may leave, and the last one ends it."""
    first, second, session = RouterStream(), RouterStream(), Session()
    job = node.begin(session)
    runs = [await call(job, first)]
    session.say()
    runs.append(await call(node.jobs.join(b"k"), second, number=2))
    session.say()
    assert (tokens(first), tokens(second)) == ([1, 1], [2, 2])
    runs[0].cancel()
    await asyncio.wait([runs[0]])
    session.say()
    await asyncio.sleep(2 * module.NOTICE)
    assert (tokens(first), tokens(second)) == ([], [2]) and not node.closed
    runs[1].cancel()
    await eventually(lambda: node.closed == [session])
    assert not is_kept(node)


async def test_an_answer_is_kept_behind_its_end(node: Node) -> None:
    """For who asks again, as long as the lease; another job may take its place."""
    first, second, session = RouterStream(), RouterStream(), Session()
    run = await call(node.begin(session), first)
    session.say()
    session.end()
    await run
    assert node.closed == [session]
    for _ in range(2):
        await node.jobs.join(b"k").serve(second, 5)
        assert tokens(second) == [5]
    node.jobs.lease = 0.05
    await node.jobs.join(b"k").serve(second, 5)
    await eventually(lambda: not is_kept(node))
    assert node.jobs._kept.total() == 0
    again = node.begin(Session())
    assert node.jobs.begin(b"k", Session(), False) is None  # type: ignore[arg-type]
    again.end()


async def test_clients_share_the_room_for_answers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of the client that has most gives way."""
    weight = module.OVERHEAD + 1  # of a job that says no more than that it is kept
    monkeypatch.setattr(module, "MAX_KEPT", 4 * weight)
    for number, client in enumerate("aaab"):
        session = Session(client=client)
        run = await call(node.begin(session, b"%d" % number), RouterStream())
        session.end()
        await run
    assert [is_kept(node, b"%d" % number) for number in range(4)] == [True] * 4
    last = node.begin(Session(client="b"), b"4")
    assert [is_kept(node, b"%d" % number) for number in range(4)] == [False, True, True, True]
    last.end()


async def test_a_job_that_a_living_router_cancels_ends(node: Node) -> None:
    session, stream = Session(), RouterStream()
    run = await call(node.begin(session), stream)
    run.cancel()
    await eventually(lambda: node.closed == [session])
    assert not is_kept(node)


async def test_a_stream_that_is_lost_alone_fails_its_router(node: Node) -> None:
    """It lives, and goes on elsewhere; another router reads on."""
    session, stream, second = Session(), RouterStream(), RouterStream()
    job = node.begin(session)
    run, other = await call(job, stream), await call(job, second, 2)
    stream.close()
    with pytest.raises(NodeError, match="stream"):
        await asyncio.wait_for(run, 60)
    session.say()
    assert tokens(second) == [2] and not node.closed
    second.close()
    with pytest.raises(NodeError, match="stream"):
        await asyncio.wait_for(other, 60)
    await eventually(lambda: node.closed == [session])


@pytest.mark.parametrize("why", ["no KV", "too many", "too much", "lapsed"])
async def test_a_job_that_is_not_kept_ends_with_its_router(
    node: Node, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    session, stream = Session(has_kv=why != "no KV"), RouterStream()
    if why == "too many":
        monkeypatch.setattr(module, "MAX_ORPHANS", 0)
    if why == "too much":
        monkeypatch.setattr(module, "MAX_KEPT", module.OVERHEAD)
    if why == "lapsed":
        node.jobs.lease = 0.05
    run = await call(node.begin(session), stream)
    session.say()
    await node.die(run, stream)
    await eventually(lambda: node.closed == [session])
    assert not is_kept(node)
