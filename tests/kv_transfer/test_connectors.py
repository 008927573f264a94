"""The connectors themselves: what peers may say, who may touch which blocks, who goes first."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from connector_ranks import GEOMETRY, ID, RECT, SINK_IDS, Rank, ranks, submit
from kv_fakes import FakeConnector
from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.common.worker.kv_cache import GroupCache
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import (
    BlockRun,
    Failed,
    KVConnector,
    Landed,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors import tcp
from pdserve.kv_transfer.connectors.base import sender, sockets
from pdserve.kv_transfer.connectors.base.handshake import recv_frame, send_frame
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.shm import Greeting, ShmConnector
from pdserve.kv_transfer.connectors.tcp import Options, TCPConnector, TCPTransport
from pdserve.kv_transfer.frame import HEADER_NBYTES, Frame, FrameKind
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import Piece, Rect
from pdserve.kv_transfer.rank.worker_connector import build_worker_connector
from pdserve.kv_transfer.selection import RankConfig
from waiting import wait_until

CONFIRM = Frame(FrameKind.CONFIRM, count=1).encode()  # follows the payload of DATA


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    before = threading.active_count()
    with ranks() as make:
        yield make
    wait_until(lambda: threading.active_count() <= before)  # a timer that was cancelled may be late


def data_frame(first: int, count: int, **changes: Any) -> tuple[Frame, bytes]:
    nbytes = piece_nbytes(torch.empty(GEOMETRY.shape(RECT)), RECT, count)
    frame = Frame(FrameKind.DATA, ID, 1, RECT, first, count, nbytes)
    return replace(frame, **changes), b"\x3f" * nbytes + CONFIRM


def say(pipe: SocketPipe, frame: Frame, payload: bytes = b"") -> None:
    pipe.sock.sendall(frame.encode() + payload)


@contextlib.contextmanager
def greeted(sink: Rank) -> Iterator[SocketPipe]:
    """A hand-made source that the sink has welcomed."""
    pipe = TCPTransport(Options()).dial(sink.connector.endpoint())
    try:
        send_frame(pipe, Frame(FrameKind.HELLO), b"same")
        assert recv_frame(pipe).kind is FrameKind.WELCOME
        yield pipe
    finally:
        pipe.close()


def closed(pipe: SocketPipe) -> bool:
    pipe.sock.settimeout(30.0)
    try:
        return pipe.sock.recv(1) == b""
    except ConnectionResetError:
        return True


# ---- what peers say ----


def test_frames_survive_the_wire() -> None:
    frame = Frame(FrameKind.OFFER, ID, 7, Rect(1, 2, 3, 4), 5, 6, 1 << 40)
    assert len(frame.encode()) == HEADER_NBYTES
    assert Frame.decode(frame.encode()) == frame
    for position, value in ((0, b"X"), (5, b"\x09"), (7, b"\xff")):
        broken = bytearray(frame.encode())
        broken[position : position + 1] = value
        with pytest.raises(TransferError, match="BAD_FRAME"):
            Frame.decode(bytes(broken))


def test_a_flipped_bit_of_a_header_ends_its_transfer_at_once(rank: Callable[..., Rank]) -> None:
    """In most fields it named another transfer, and this one waited for its lease: 23 seconds."""
    sink = rank(TCPConnector)
    for position in range(0, HEADER_NBYTES, 3):
        transfer_id = bytes([position]) * 16
        sink.connector.accept(SinkTransfer(transfer_id, 1, 0, SINK_IDS))
        with greeted(sink) as pipe:
            say(pipe, Frame(FrameKind.BEGIN, transfer_id, 1, RECT))
            frame, payload = data_frame(0, 4, transfer_id=transfer_id)
            header = bytearray(frame.encode())
            header[position] ^= 1 << position % 8
            pipe.sock.sendall(bytes(header) + payload)
            assert closed(pipe)
        failed = sink.expect(Failed)
        assert (failed.transfer_id, failed.code) == (transfer_id, "BAD_FRAME")


def test_a_refusal_is_read_when_the_sink_has_left_in_mid_greeting(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptors go behind the greeting, which the sink may have refused by then."""
    send_fds = socket.send_fds

    def late(sock: socket.socket, *args: Any) -> int:
        gone = select.poll()
        gone.register(sock, 0)  # POLLHUP alone
        assert gone.poll(60_000)
        return send_fds(sock, *args)

    monkeypatch.setattr(socket, "send_fds", late)
    sink, source = rank(ShmConnector), rank(ShmConnector, fingerprint="other")
    submit(source, sink)
    failed = source.expect(Failed)
    assert (failed.code, failed.retryable) == ("FINGERPRINT_MISMATCH", False)


def test_a_source_that_cannot_introduce_itself_says_why(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "send_fds", none_left)
    sink, source = rank(ShmConnector), rank(ShmConnector)
    submit(source, sink)
    failed = source.expect(Failed)
    assert failed.code == "CONNECT_FAILED" and os.strerror(errno.EMFILE) in failed.message


def test_late_frames_are_drained_and_counted(rank: Callable[..., Rank]) -> None:
    sink = rank(TCPConnector)
    with greeted(sink) as pipe:
        say(pipe, *data_frame(0, 2))  # not accepted yet
        wait_until(lambda: sink.connector.counts["unknown_frame"] == 1)
        sink.connector.accept(SinkTransfer(ID, 2, 0, SINK_IDS))
        say(pipe, *data_frame(0, 2, epoch=1))
        say(pipe, *data_frame(0, 2, epoch=2))
        say(pipe, *data_frame(0, 2, epoch=2))
        assert not sink.cache[:, :, list(SINK_IDS[2:])].any()
        say(pipe, *data_frame(2, 2, epoch=2))
        assert sink.expect(Landed).epoch == 2
        say(pipe, *data_frame(2, 2, epoch=2))
        wait_until(lambda: sink.connector.counts["duplicate_frame"] == 2)
    assert sink.connector.counts["stale_frame"] == 1
    assert sink.cache[:, :, list(SINK_IDS)].all()


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([data_frame(1, 1)], "block 1 came where 0 was due"),
        ([data_frame(0, 2), data_frame(1, 2)], "block 1 came where 2 was due"),
        ([data_frame(3, 2)], "not within 0…3"),
        ([data_frame(0, 0, nbytes=0)], "not within 0…3"),
        ([data_frame(0, 1, nbytes=17)], "17 bytes"),
        ([data_frame(0, 1, rect=Rect(0, 9, 0, 2))], "not within this rank's"),
        ([data_frame(0, 1, rect=Rect(2, 1, 0, 2))], "not within this rank's"),
        ([data_frame(0, 2), data_frame(0, 1, rect=Rect(0, 1, 0, 1))], "overlaps"),
        ([data_frame(0, 1, kind=FrameKind.CONFIRM)], "CONFIRM from a source that pushes"),
    ],
)
def test_frames_that_contradict_the_agreement_fail_the_transfer(
    rank: Callable[..., Rank], frames: list[tuple[Frame, bytes]], says: str
) -> None:
    sink = rank(TCPConnector)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    with greeted(sink) as pipe:
        say(pipe, Frame(FrameKind.BEGIN, ID, 1, RECT))
        for frame, payload in frames[:-1]:
            say(pipe, frame, payload)
        say(pipe, frames[-1][0])
        failed = sink.expect(Failed)
        assert (failed.code, failed.blame, failed.retryable) == ("BAD_FRAME", "prefill", False)
        assert says in failed.message
        assert closed(pipe)
    assert not sink.cache[:, :, [0, 1, 3, 5]].any()


# ---- who may touch the blocks ----


@pytest.mark.parametrize("within", ["a header", "an unknown payload", "a payload given up"])
def test_a_peer_that_stalls_within_a_frame_is_lost_and_a_silent_one_is_not(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    monkeypatch.setattr(sockets, "STALL_S", 4.0)  # the greetings are quicker
    sink, other = rank(TCPConnector), ID[::-1]
    sink.connector.accept(SinkTransfer(other, 1, 0, (0, 1)))
    frame, payload = data_frame(0, 4)
    with greeted(sink) as silent, greeted(sink) as pipe:
        say(pipe, Frame(FrameKind.BEGIN, other, 1, RECT))
        if within == "a payload given up":
            sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
        header = frame.encode()
        pipe.sock.sendall(header[:-1] if within == "a header" else header + payload[:100])
        if within == "a payload given up":
            wait_until(lambda: bool(sink.cache.any()))
            sink.connector.quiesce(ID)
        while (failed := sink.expect(Failed)).transfer_id == ID:
            pass  # it was given up late
        assert (failed.transfer_id, failed.code) == (other, "PEER_LOST")
        assert (failed.blame, failed.retryable) == ("prefill", True)
        assert closed(pipe)
        sink.connector.accept(SinkTransfer(ID, 2, 0, SINK_IDS))
        say(silent, *data_frame(0, 4, epoch=2))
        assert sink.expect(Landed).epoch == 2


@pytest.mark.parametrize("kind", [TCPConnector, ShmConnector])
def test_a_sink_that_stalls_for_good_is_lost(
    rank: Callable[..., Rank], kind: type[KVConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no bytes, or does not say that it has read what was offered."""
    monkeypatch.setattr(sockets, "STALL_S", 4.0)  # the greeting is quicker
    monkeypatch.setattr(tcp, "BUFFER_NBYTES", 1 << 14)
    sink, source = rank(kind), rank(kind)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    over = threading.Event()
    monkeypatch.setattr(type(sink.connector), "_take", lambda *_: over.wait())
    submit(source, sink)
    for first in range(0, 6000, 16):  # more than the socket buffers hold
        source.connector.ready(ID, BlockRun(first, 16), tuple(range(16)), False)
    failed = source.expect(Failed)
    over.set()
    assert (failed.code, failed.blame, failed.retryable) == ("PEER_LOST", "decode", True)


def test_a_frame_that_the_source_did_not_hold_to_its_end_does_not_count(
    rank: Callable[..., Rank],
) -> None:
    sink = rank(TCPConnector)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    with greeted(sink) as pipe:
        frame, payload = data_frame(0, 4)
        say(pipe, frame, payload.removesuffix(CONFIRM))
        say(pipe, replace(frame, kind=FrameKind.CONFIRM, count=0, nbytes=0))
        failed = sink.expect(Failed)
        assert (failed.code, failed.blame, failed.retryable) == ("EXPIRED", "prefill", True)


def test_a_closed_gate_waits_for_threads_inside_and_admits_none() -> None:
    gate, inside, leave = Gate(), threading.Event(), threading.Event()

    def work() -> None:
        with gate.passage(leave.set) as admitted:
            assert admitted
            inside.set()
            leave.wait(30.0)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(30.0)
    gate.close(grace=0.01)  # interrupts
    assert leave.is_set()
    with gate.passage(leave.set) as admitted:
        assert not admitted
    thread.join()


# ---- connections ----


@pytest.mark.parametrize("kind", [TCPConnector, ShmConnector])
def test_a_connection_is_kept_and_replaced_when_it_broke(
    rank: Callable[..., Rank], kind: type[KVConnector]
) -> None:
    sink, source = rank(kind), rank(kind, fill=1.0)
    pipes = sink.connector
    for number in range(3):
        transfer_id = bytes([number]) * 16
        sink.connector.accept(SinkTransfer(transfer_id, 1, 0, SINK_IDS))
        submit(source, sink, transfer_id)
        source.connector.ready(transfer_id, BlockRun(0, 4), (0, 1, 2, 3), True)
        sink.expect(Landed)
        source.expect(Sent)
        open_pipes = list(pipes._server._pipes)
        assert len(open_pipes) == 1
        if number == 1:
            open_pipes[0].interrupt()  # the sink's host restarted, say
            wait_until(lambda: not pipes._server._pipes)


def test_an_idle_connection_is_closed(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer under way keeps it; it is made again for the next one."""
    monkeypatch.setattr(sender, "IDLE_S", 0.05)
    waits: list[float] = []
    get = sender.FairQueue.get

    def waiting(self: sender.FairQueue, timeout: float) -> Any:
        waits.append(timeout)
        return get(self, timeout)

    monkeypatch.setattr(sender.FairQueue, "get", waiting)
    sink, source = rank(TCPConnector), rank(TCPConnector, fill=1.0)
    for transfer_id in (ID, ID[::-1]):
        sink.connector.accept(SinkTransfer(transfer_id, 1, 0, SINK_IDS))
        submit(source, sink, transfer_id)
        waits.clear()
        wait_until(lambda: len(waits) > 3)
        assert threads("kv-source") and threads("kv-sink")
        source.connector.ready(transfer_id, BlockRun(0, 4), (0, 1, 2, 3), True)
        sink.expect(Landed)
        wait_until(lambda: not threads("kv-source") and not threads("kv-sink"))


def threads(name: str) -> int:
    """One is at work for each connection."""
    return sum(each.name == name for each in threading.enumerate())


def test_a_connector_that_raises_fails_its_transfers(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, endpoint: bytes) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(TCPTransport, "dial", broken)
    sink, source = rank(TCPConnector), rank(TCPConnector)
    for transfer_id in (ID, ID[::-1]):  # the worker survives
        submit(source, sink, transfer_id)
        failed = source.expect(Failed)
        assert (failed.code, failed.blame) == ("CONNECTOR_FAILED", "prefill")


# ---- shared memory ----


def test_the_sink_cannot_write_into_the_source(rank: Callable[..., Rank]) -> None:
    source = rank(ShmConnector)
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"pdserve-test-{os.getpid()}".encode()
        listener.bind(b"\0" + name)
        listener.listen()
        source.connector.submit(SourceTransfer(ID, 1, ((Piece(0, 0, RECT), name),)))
        conn, _ = listener.accept()
    with conn:
        hello = Frame.decode(conn.recv(HEADER_NBYTES))
        greeting = msgspec.msgpack.decode(conn.recv(hello.nbytes), type=Greeting)
        _, fds, _, _ = socket.recv_fds(conn, 1, 1)
        with pytest.raises(PermissionError):
            mmap.mmap(fds[0], greeting.nbytes)
        mmap.mmap(fds[0], greeting.nbytes, prot=mmap.PROT_READ).close()
        os.close(fds[0])


@pytest.mark.parametrize(
    ("ids", "rect", "says"),
    [
        ((99,), RECT, "block 99 of 16"),
        ((0,), Rect(0, 9, 0, 2), "not within this rank's"),
        ((0, 1), RECT, "bytes of block ids"),
    ],
)
def test_offers_are_checked(
    rank: Callable[..., Rank], ids: tuple[int, ...], rect: Rect, says: str
) -> None:
    sink, source = rank(ShmConnector), rank(ShmConnector)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    channel = source.connector.dial(sink.connector.endpoint())
    channel.begin(Frame(FrameKind.BEGIN, ID, 1, RECT))
    with pytest.raises(OSError):
        channel.deliver(Frame(FrameKind.OFFER, ID, 1, rect, 0, 1), ids, Gate())
    assert says in sink.expect(Failed).message
    channel.close()


class FutureConnector(FakeConnector):
    api_version = 99


def test_misconfiguration_is_told_at_start() -> None:
    cache = torch.zeros(GEOMETRY.shape(RECT))
    shape = GEOMETRY.cache_shape(RECT)

    def build(config: RankConfig, where: torch.Tensor = cache) -> None:
        encoded = msgspec.msgpack.encode(config)
        caches = [GroupCache(where, shape)]
        build_worker_connector(caches, None, 0, "127.0.0.1", encoded, lambda message: None)

    with pytest.raises(ConfigError, match="unknown field `lanes`"):
        build(RankConfig({"tcp": {"lanes": 4}}, "f"))
    with pytest.raises(ConfigError, match=r"`int` >= 1 - at `\$.streams`"):
        build(RankConfig({"tcp": {"streams": 0}}, "f"))
    with pytest.raises(ConfigError, match="congestion control 'pigeon'"):
        build(RankConfig({"tcp": {"congestion_control": "pigeon"}}, "f"))
    build(RankConfig({"tcp": {"congestion_control": ""}}, "f", source=True))
    with pytest.raises(ConfigError, match="no option 'streams'"):
        build(RankConfig({"shm": {"streams": 4}}, "f"))
    with pytest.raises(ConfigError, match="needs the cache in shared memory"):
        build(RankConfig({"tcp": {}, "shm": {}}, "f", source=True))
    with pytest.raises(ConfigError, match="unknown name 'pigeon'"):
        build(RankConfig({"pigeon": {}}, "f"))
    with pytest.raises(ConfigError, match="speaks API version 99"):
        build(RankConfig({"test_connectors:FutureConnector": {}}, "f"))
    with pytest.raises(ConfigError, match="ShmConnector cannot move KV of a meta cache"):
        build(RankConfig({"shm": {}}, "f"), cache.to("meta"))
