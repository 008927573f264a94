"""Blocks through a process group, over gloo: what ends a wait, how two ranks meet. What every
connector promises is `test_conformance.py`'s."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist

from connector_ranks import GEOMETRY, ID, RECT, SINK_IDS, Rank, ranks, submit, submit_to
from pdserve.common.core.errors import ConfigError
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import (
    BlockRun,
    Failed,
    Landed,
    Sent,
    SinkTransfer,
)
from pdserve.kv_transfer.connectors.base import channel as base_channel
from pdserve.kv_transfer.connectors.base import handshake
from pdserve.kv_transfer.connectors.base.handshake import recv_frame, send_frame
from pdserve.kv_transfer.connectors.nccl.connector import NCCLConnector
from pdserve.kv_transfer.connectors.nccl.group import NcclPair, Side
from pdserve.kv_transfer.connectors.tcp import Options, TCPTransport
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import Rect
from waiting import wait_until

PROMPT = 20.0  # seconds within which a blocked thread must return: before any time-out


@pytest.fixture
def make() -> Iterator[Callable[..., Rank]]:
    """Ranks; checks that no thread, gloo's included, and no socket outlives them."""
    before = num_tasks(), num_sockets()
    with ranks() as made:
        yield lambda kind=NCCLConnector, **options: made(kind, **options)

    def free() -> bool:
        return num_tasks() <= before[0] and num_sockets() <= before[1]

    try:
        wait_until(free, seconds=0.2)
    except AssertionError:
        gc.collect()  # Python 3.12 keeps a failed pair in the cycle of its error until then
        wait_until(free)


def num_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def num_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was closed, as the list's own
            count += "socket" in os.readlink(f"/proc/self/fd/{name}")
    return count


def data(first: int, count: int, **changes: Any) -> Frame:
    nbytes = piece_nbytes(torch.empty(GEOMETRY.shape(RECT)), RECT, count)
    return replace(Frame(FrameKind.DATA, ID, 1, RECT, first, count, nbytes), **changes)


def timed(call: Callable[[], None]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


# ---- bytes ----


def test_a_run_travels_in_parts(make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    sink, source = make(), make()
    source.cache.copy_(torch.randn(source.cache.shape))
    block = piece_nbytes(sink.cache, RECT, 1)
    monkeypatch.setattr(base_channel, "PART_NBYTES", 2 * block + 1)
    assert list(base_channel.parts(sink.cache, RECT, 3)) == [slice(0, 2), slice(2, 3)]
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    submit(source, sink)
    source.connector.ready(ID, BlockRun(0, 3), (8, 1, 2), False)
    source.connector.ready(ID, BlockRun(3, 1), (0,), True)
    assert sink.expect(Landed).nbytes == source.expect(Sent).nbytes == 4 * block
    assert torch.equal(sink.cache[:, :, list(SINK_IDS)], source.cache[:, :, [8, 1, 2, 0]])


# ---- late frames ----


@pytest.mark.parametrize(
    "frame",
    [data(0, 2, nbytes=17), data(0, 2, rect=Rect(0, 9, 0, 2)), data(0, 2, rect=Rect(2, 1, 0, 2))],
)
def test_a_late_frame_of_another_size_ends_the_connection(
    make: Callable[..., Rank], frame: Frame
) -> None:
    sink, source = make(), make()
    channel = source.connector.dial(sink.connector.endpoint())
    channel._pipe.sock.sendall(frame.encode())
    wait_until(lambda: sink.connector.counts["BAD_FRAME"] == 1)
    wait_until(lambda: not channel.alive())
    channel.close()


# ---- blocked threads return ----


def test_quiesce_frees_a_sink_whose_source_has_stalled(make: Callable[..., Rank]) -> None:
    """Its connection goes on when it does."""
    sink, source = make(), make(fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    channel = source.connector.dial(sink.connector.endpoint())
    late = data(0, 4)
    channel._pipe.sock.sendall(late.encode())  # and no payload
    wait_until(lambda: bool(sink.connector.receiver._inbound[ID].next_block))
    assert timed(lambda: sink.connector.quiesce(ID)) < PROMPT
    channel._mover.send(late, (0, 1, 2, 3), Gate())
    send_frame(channel._pipe, replace(late, kind=FrameKind.CONFIRM, count=1))
    assert not sink.cache.any()
    sink.connector.accept(SinkTransfer(ID, 2, 0, SINK_IDS))
    channel.deliver(data(0, 4, epoch=2), (0, 1, 2, 3), Gate())
    assert sink.expect(Landed).epoch == 2
    channel.close()


class Impatient(NCCLConnector):
    def __init__(self, context: Any, config: Any) -> None:
        super().__init__(context, {"stall_s": 0.3})


def test_a_stalled_source_is_lost(make: Callable[..., Rank]) -> None:
    sink, source = make(Impatient), make()
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    channel = source.connector.dial(sink.connector.endpoint())
    channel.begin(Frame(FrameKind.BEGIN, ID, 1, RECT))
    channel._pipe.sock.sendall(data(0, 4).encode())
    failed = sink.expect(Failed, within=PROMPT)
    assert (failed.code, failed.blame, failed.retryable) == ("PEER_LOST", "prefill", True)
    assert "Timed out" in failed.message
    channel.close()


# ---- meeting ----


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ((Frame(FrameKind.MEET), b"\xc1"), "BAD_FRAME"),
        ((Frame(FrameKind.WELCOME), b""), "BAD_FRAME"),
        ((Frame(FrameKind.MEET), msgspec.msgpack.encode(("a key", b""))), "CONNECT_FAILED"),
    ],
)
def test_a_pair_that_cannot_meet(
    make: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says: tuple[Frame, bytes],
    code: str,
) -> None:
    caplog.set_level("ERROR")  # a captured record keeps the error's frames, and so the group
    monkeypatch.setattr(handshake, "GREETING_S", 0.3 if code == "CONNECT_FAILED" else 60.0)
    source = make()
    listener = TCPTransport(Options()).listen("127.0.0.1")
    submit_to(source, listener.endpoint)
    pipe = listener.accept()
    hello = recv_frame(pipe)
    pipe.recv_tensor(torch.empty(hello.nbytes, dtype=torch.uint8))
    send_frame(pipe, Frame(FrameKind.WELCOME))
    send_frame(pipe, *says)
    failed = source.expect(Failed)
    assert (failed.code, failed.blame) == (code, "decode")
    pipe.close()
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_group_listens_where_the_connector_does(make: Callable[..., Rank], host: str) -> None:
    sink, source = make(), make(fill=1.0)
    for each in (sink, source):
        each.connector.context = replace(each.connector.context, bind_host=host)
    before = listening()
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    submit(source, sink)
    source.connector.ready(ID, BlockRun(0, 4), (0, 1, 2, 3), True)
    sink.expect(Landed)
    assert {address for address, _ in listening() - before} == {host}


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process's sockets listen."""
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == "LISTEN"}


def test_misconfiguration_is_told_at_start(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make().connector.context
    with pytest.raises(ConfigError, match="unknown field `streams`"):
        NCCLConnector(context, {"streams": 4})
    with pytest.raises(ConfigError, match="> 0"):
        NCCLConnector(context, {"stall_s": 0})
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="no gloo: choose --kv-connector tcp"):
        NCCLConnector(context, {})


# ---- NCCL's waits, without a GPU ----


class FakeNccl:
    """Its first operation completes, the others never do."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.operations = 0
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeNccl:
        self.operations += 1
        return self

    def is_completed(self) -> bool:
        return self.operations == 1

    def wait(self, timeout: timedelta) -> None:
        assert self.is_completed()

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("ends", ["peer", "interrupt", "stall"])
def test_nccl_waits_end(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    ours, theirs = socket.socketpair()
    stall_s = 0.2 if ends == "stall" else 30.0
    group = NcclPair(dist.HashStore(), Side.SOURCE, ours, stall_s, torch.device("cpu"))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    theirs.sendall(b"headers may be waiting")
    act = {"peer": theirs.close, "interrupt": lambda: ours.shutdown(socket.SHUT_RDWR)}
    timer = threading.Timer(0.1, act.get(ends, lambda: None))
    timer.start()
    with pytest.raises(ConnectionError, match="nothing came" if ends == "stall" else "closed"):
        group.send(torch.zeros(1))
    backend = group._group
    group.close()
    assert backend.aborted
    timer.join()
    ours.close()
    theirs.close()
