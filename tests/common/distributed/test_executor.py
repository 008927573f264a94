"""Both executors with a toy worker: round trips, extension calls, events, failures, death."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from paths import HELPERS
from pdserve.common.core import waits
from pdserve.common.core.errors import Blame, ConfigError, NodeError, TransferError
from pdserve.common.distributed import fanout, wire
from pdserve.common.distributed.executor import Executor, InProcessExecutor, WorkerSpec
from pdserve.common.distributed.launch import MultiprocessExecutor, make_executor
from pdserve.common.distributed.rank_main import Outbox
from processes import alive
from toy_worker import specs

# ---- helpers ----


@asynccontextmanager
async def running(executor: Executor, deadline: float = 5.0) -> AsyncIterator[list[bytes]]:
    try:
        yield list(await executor.start())
    finally:
        await executor.shutdown(deadline)


def in_process() -> Executor:
    return InProcessExecutor(specs(1)[0])


def multi_process() -> Executor:
    return MultiprocessExecutor(specs(2))


forked = pytest.mark.usefixtures("forked_ranks")  # what is not about how ranks start


def both(test: Any) -> Any:
    return forked(pytest.mark.parametrize("make", [in_process, multi_process])(test))


def either_size(test: Any) -> Any:
    return forked(pytest.mark.parametrize("size", [1, 2])(test))


def pids_of(answers: list[bytes]) -> list[int]:
    return [int(answer.split()[1]) for answer in answers]


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder of the test's own, which must be empty in the end."""
    short = Path(tempfile.mkdtemp(prefix="pd"))  # socket paths are limited to 107 bytes
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield
    assert list(short.iterdir()) == [], "an executor left files behind"
    short.rmdir()


# ---- what both promise ----


@both
async def test_extension_is_served_while_a_step_runs(make: Callable[[], Executor]) -> None:
    executor = make()
    async with running(executor) as answers:
        step = asyncio.create_task(executor.step(b"wait"))
        for rank in range(len(answers)):
            assert await executor.call(rank, b"x") == b"call %d x" % rank
        assert not step.done()
        for rank in range(len(answers)):
            await executor.call(rank, b"go")
        assert await step == b"step 0 wait"


@both
async def test_a_step_begins_before_the_last_one_s_late_result(
    make: Callable[[], Executor],
) -> None:
    executor = make()
    async with running(executor) as answers:
        late = asyncio.create_task(executor.step(b"later wait"))
        assert await executor.step(b"x") == b"step 0 x"
        assert not late.done()
        for rank in range(len(answers)):
            await executor.call(rank, b"go")
        assert await late == b"step 0 wait"
        broken = asyncio.create_task(executor.step(b"later raise 0"))
        with pytest.raises(NodeError, match="bad batch"):
            await broken


@both
async def test_events_are_heard_before_the_answer(make: Callable[[], Executor]) -> None:
    executor = make()
    heard: list[tuple[int, bytes]] = []
    executor.on_event(lambda *said: heard.append(said))
    async with running(executor) as answers:
        for rank in range(len(answers)):
            await executor.call(rank, b"emit")
            assert heard.pop() == (rank, b"event")


@both
@pytest.mark.parametrize("message", [b"raise", b"short raise"])
async def test_extension_error_keeps_its_type(make: Callable[[], Executor], message: bytes) -> None:
    executor = make()
    async with running(executor):
        with pytest.raises(TransferError, match="no such peer") as caught:
            await executor.call(0, message)
        assert caught.value.code == "PEER_LOST"
        assert caught.value.blame is Blame.PREFILL
        assert await executor.call(0, b"x") == b"call 0 x"


@both
async def test_a_short_call_needs_no_thread(make: Callable[[], Executor]) -> None:
    """Where the rank is in the node's process; elsewhere it is one like any other."""
    executor = make()
    async with running(executor):
        name = await executor.call(0, b"thread")
        here = isinstance(executor, InProcessExecutor)
        assert (name == threading.current_thread().name.encode()) is here


async def test_calls_are_served_though_there_is_no_room_for_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are free when a rank has answered that nothing writes into them, or is dead. This one
    must not pass for dead because other processes have taken all threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor = in_process()
    async with running(executor):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            assert await executor.call(0, b"x") == b"call 0 x"


@both
async def test_a_step_that_failed_names_rank_and_cause_and_is_the_last(
    make: Callable[[], Executor],
) -> None:
    executor = make()
    async with running(executor) as answers:
        last = len(answers) - 1
        with pytest.raises(NodeError, match=f"rank {last}: ValueError: bad batch"):
            await executor.step(b"raise %d" % last)
        if last:  # a rank of several has computed it
            for ask in (executor.step(b"x"), executor.call(0, b"x")):
                with pytest.raises(NodeError, match="rank 1: ValueError"):
                    await ask


@either_size
async def test_call_without_extension(size: int) -> None:
    executor = make_executor(specs(size, extension=False))
    async with running(executor):
        with pytest.raises(NodeError, match="no extension"):
            await executor.call(0, b"x")


@either_size
async def test_shutdown_closes_extension_then_worker(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_CLOSED", str(tmp_path))
    executor = make_executor(specs(size))
    async with running(executor):
        pass
    names = {f"{part}.{rank}" for part in ("extension", "worker") for rank in range(size)}
    assert set(os.listdir(tmp_path)) == names
    with pytest.raises(NodeError):
        await executor.step(b"x")
    await executor.shutdown(1.0)  # a second time does no harm


# ---- processes ----


def test_threads_that_still_speak_do_not_keep_a_rank_from_its_end() -> None:
    """ZeroMQ's sockets are not safe between threads, and a context ends when all are closed."""
    context, spoke = zmq.Context(), threading.Event()
    context.setsockopt(zmq.LINGER, 0)  # the peer does not read
    with context.socket(zmq.PULL) as node:
        port = node.bind_to_random_port("tcp://127.0.0.1")
        socket = context.socket(zmq.PUSH)
        wire.remove_high_water_mark(socket)
        socket.connect(f"tcp://127.0.0.1:{port}")
        out = Outbox(socket, 0)

        def speak() -> None:
            for _ in range(1000):
                out.emit(b"event")
                spoke.set()

        with ThreadPoolExecutor(4) as pool:
            speaking = [pool.submit(speak) for _ in range(4)]
            spoke.wait()
            out.close()
            assert [each.result() for each in speaking] == [None] * 4
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()


@forked
async def test_killed_rank_fails_what_waits_and_is_reported_once() -> None:
    executor = MultiprocessExecutor(specs(2))
    deaths: list[tuple[int, str]] = []
    executor.on_death(lambda rank, reason: deaths.append((rank, reason)))
    async with running(executor) as answers:
        pids = pids_of(answers)
        step = asyncio.create_task(executor.step(b"wait"))
        await executor.call(0, b"x")  # the step is on its way
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(NodeError, match=r"rank 1 .*killed by SIGKILL") as caught:
            await step
        assert caught.value.code == "RANK_DIED"
        await eventually(lambda: not any(map(alive, pids)))
        with pytest.raises(NodeError, match="rank 1"):
            await executor.step(b"x")
        with pytest.raises(NodeError, match="rank 1"):
            await executor.call(0, b"x")
    assert [rank for rank, _ in deaths] == [1]


@forked
async def test_a_stop_ends_though_zeromq_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq's end waits for its threads, which wait for ever when they miss a wake-up."""
    stuck = threading.Event()
    term = zmq.Context.term

    def never(context: zmq.Context) -> None:
        stuck.wait(60)
        term(context)

    monkeypatch.setattr(zmq.Context, "term", never)
    monkeypatch.setattr(fanout, "_KILL_TIMEOUT", 1.0)
    executor = MultiprocessExecutor(specs(2))
    pids = pids_of(list(await executor.start()))
    try:
        async with asyncio.timeout(30):
            await executor.shutdown(deadline=5.0)
        assert "ZeroMQ did not stop within 1 s; its threads remain" in caplog.text
        await eventually(lambda: not any(map(alive, pids)))
    finally:
        stuck.set()


@forked
async def test_a_stop_ends_though_a_rank_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that waits for a disk cannot be killed, and its launcher does not answer."""
    executor = MultiprocessExecutor(specs(2))
    launcher = executor._launcher
    kill = launcher.kill
    pids = pids_of(list(await executor.start()))

    async def for_ever() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(fanout, "_KILL_TIMEOUT", 1.0)
    monkeypatch.setattr(launcher, "kill", lambda: None)
    monkeypatch.setattr(launcher, "close", for_ever)
    step = asyncio.create_task(executor.step(b"wait"))
    await executor.call(0, b"x")  # the step is on its way
    async with asyncio.timeout(30):
        await executor.shutdown(deadline=0.1)
    assert "ranks are still running 1 s after they were killed" in caplog.text
    assert "resources were not freed" in caplog.text
    with pytest.raises(NodeError):
        await step
    kill()
    await eventually(lambda: not any(map(alive, pids)))


async def test_a_rank_with_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "code_version", lambda: "pdserve 9, torch 9")
    executor = MultiprocessExecutor(specs())
    with pytest.raises(ConfigError, match=r"has pdserve .*, torch .*, the node pdserve 9, torch 9"):
        await executor.start()


async def test_rank_that_dies_while_it_starts() -> None:
    executor = MultiprocessExecutor(specs(2, exit_rank=1))
    with pytest.raises(NodeError, match=r"rank 1 .*exited with code 7"):
        await executor.start()


@forked
async def test_shutdown_kills_a_busy_rank_at_the_deadline() -> None:
    executor = MultiprocessExecutor(specs(2))
    pids = pids_of(list(await executor.start()))
    step = asyncio.create_task(executor.step(b"wait"))
    await executor.call(0, b"x")  # the step is on its way
    await executor.shutdown(deadline=0.3)
    assert not any(map(alive, pids))
    with pytest.raises(NodeError):
        await step


@both
async def test_an_event_whose_handler_fails_ends_the_rank(make: Callable[[], Executor]) -> None:
    """A call that waits for the event would otherwise wait for ever."""
    executor = make()
    reasons: list[str] = []

    def misunderstand(rank: int, event: bytes) -> None:
        raise ValueError("what is this?")

    executor.on_event(misunderstand)
    executor.on_death(lambda rank, reason: reasons.append(reason))
    async with running(executor):
        with suppress(NodeError):  # the call may be answered before the node hears of it
            await executor.call(0, b"emit")
        await eventually(lambda: bool(reasons))
    assert len(reasons) == 1 and "what is this?" in reasons[0]


class ThisRank:
    """A launcher whose only rank is the test."""

    death_notice_seconds = 0.0

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        socket.bind("inproc://node")
        self.rank = zmq.Context.shadow(socket.context.underlying).socket(zmq.DEALER)
        self.rank.set_hwm(0)
        self.rank.connect("inproc://node")
        for link in wire.Link:
            self.send(wire.RankMessage.RESULT, wire.start_number(0, link))

    def send(self, kind: wire.RankMessage, number: int = 0) -> None:
        self.rank.send_multipart([wire.HEADER.pack(0, kind, number), b""])

    async def launch(self, spec: WorkerSpec) -> None:
        pass

    async def wait(self, rank: int) -> str:
        await self.ended.wait()
        return "ended"

    def where(self, rank: int) -> str:
        return "here"

    def kill(self) -> None:
        self.rank.close(linger=0)
        self.ended.set()

    def started(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_rank_that_sends_without_a_pause_does_not_block_the_event_loop() -> None:
    launcher = ThisRank()
    executor = fanout.FanOutExecutor(specs(1), launcher)
    turns, taken = 0, Counter[int]()  # of this task; events in each
    async with running(executor, deadline=0.1):  # it does not end by itself
        executor.on_event(lambda rank, event: taken.update([turns]))
        for _ in range(many := 10 * fanout.MAX_BURST):
            launcher.send(wire.RankMessage.EVENT)
        while taken.total() < many:
            await asyncio.sleep(0)
            turns += 1
    assert max(taken.values()) <= fanout.MAX_BURST


async def test_a_rank_may_answer_before_the_next_one_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = asyncio.create_subprocess_exec

    async def slow(*args: Any, **options: Any) -> Any:
        process = await create(*args, **options)
        answer = wire.start_number(int(args[-1]), wire.Link.OUT)
        await eventually(lambda: answer not in executor._waiting)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    executor = MultiprocessExecutor(specs(2))
    try:
        answers = await asyncio.wait_for(executor.start(), 60)
        assert [answer.split()[0] for answer in answers] == [b"0", b"1"]
    finally:
        await executor.shutdown(5.0)


async def test_a_start_that_takes_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(waits, "EVERY", 0.1)
    caplog.set_level("INFO")
    said = re.compile(r"waiting for rank 1 \(pid (\d+); builds its worker\) to start")
    come = tmp_path / "come"
    executor = MultiprocessExecutor(specs(2, late_rank=1, late_until=str(come)))
    starting = asyncio.create_task(executor.start())
    try:
        await eventually(lambda: bool(said.search(caplog.text)))
        come.touch()
        pid = pids_of(list(await starting))[1]
        assert [int(each) for each in said.findall(caplog.text)][-1] == pid
    finally:
        come.touch()
        await asyncio.wait([starting])
        await executor.shutdown(5.0)


@forked
async def test_cancelled_step_does_not_confuse_the_next() -> None:
    executor = MultiprocessExecutor(specs(2))
    async with running(executor):
        step = asyncio.create_task(executor.step(b"wait"))
        await executor.call(0, b"x")  # the step is on its way
        step.cancel()
        for rank in range(2):
            await executor.call(rank, b"go")
        assert await executor.step(b"next") == b"step 0 next"


@forked
async def test_ranks_ignore_terminal_and_supervisor_signals() -> None:
    executor = MultiprocessExecutor(specs(2))
    async with running(executor) as answers:
        for pid in pids_of(answers):
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert await executor.step(b"x") == b"step 0 x"


NODE = """
import asyncio
from pdserve.common.distributed.launch import MultiprocessExecutor
from toy_worker import specs

async def main():
    for answer in await MultiprocessExecutor(specs(2)).start():
        print(answer.split()[1].decode(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_ranks_die_with_their_node() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(HELPERS),
        "TMPDIR": tempfile.gettempdir(),
    }
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NODE), stdout=subprocess.PIPE, env=environment
    )
    assert node.stdout is not None
    pids = [int(await node.stdout.readline()) for _ in range(2)]
    assert all(map(alive, pids))
    node.kill()
    await node.wait()
    await eventually(lambda: not any(map(alive, pids)))
