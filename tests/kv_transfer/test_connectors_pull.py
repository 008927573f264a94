"""The pull protocol, and CUDA IPC's half of it with an opener that works on CPU tensors."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from connector_ranks import GEOMETRY, ID, RECT, SINK_IDS, Rank, ranks, submit
from cpu_ipc import CpuIpcConnector
from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import (
    BlockRun,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base import channel as base_channel
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.channel import FrameHash
from pdserve.kv_transfer.connectors.base.handshake import recv_frame, send_frame
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.cuda_ipc import CudaIpcConnector, Greeting, Handle, OpenedCache
from pdserve.kv_transfer.connectors.shm import Holds, PeerHolds, ShmConnector
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Piece, Rect
from waiting import wait_until

SHAPE = torch.Size(GEOMETRY.shape(RECT))


class Unreachable(CpuIpcConnector):
    def open_storage(self, handle: Handle) -> torch.UntypedStorage:
        raise RuntimeError("CUDA error: peer access is not supported\nmore lines")


class Unshareable(CpuIpcConnector):
    def share(self, storage: torch.UntypedStorage) -> Handle:
        raise RuntimeError("CUDA error: operation not supported")


@pytest.fixture
def make() -> Iterator[Callable[..., Rank]]:
    with ranks() as made:
        yield made
    CpuIpcConnector.shared.clear()


def ipc_greeting(storage: torch.UntypedStorage, **changes: Any) -> Greeting:
    handle: Handle = (0, b"", storage.nbytes(), 0, b"", 0, b"", False)
    fields: dict[str, Any] = {
        "rect": RECT,
        "num_blocks": GEOMETRY.num_blocks,
        "offset": 0,
    } | changes
    return Greeting(fingerprint="same", handle=handle, **fields)


# ---- the protocol ----


@pytest.mark.parametrize("kind", [ShmConnector, CpuIpcConnector])
def test_every_byte_in_parts_and_over_a_kept_connection(
    make: Callable[..., Rank], kind: type[KVConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, source = make(kind), make(kind)
    source.cache.copy_(torch.randn(source.cache.shape))
    monkeypatch.setattr(base_channel, "PART_NBYTES", 2 * piece_nbytes(sink.cache, RECT, 1))
    for epoch in (1, 2):  # again, after quiesce
        sink.cache.zero_()
        sink.connector.accept(SinkTransfer(ID, epoch, 0, SINK_IDS))
        submit(source, sink, epoch=epoch)
        source.connector.ready(ID, BlockRun(0, 3), (8, 1, 2), False)
        source.connector.ready(ID, BlockRun(3, 1), (0,), True)
        assert sink.expect(Landed).nbytes == source.expect(Sent).nbytes
        assert torch.equal(sink.cache[:, :, list(SINK_IDS)], source.cache[:, :, [8, 1, 2, 0]])
        others = sorted(set(range(GEOMETRY.num_blocks)) - set(SINK_IDS))
        assert not sink.cache[:, :, others].any()
        for each in (sink, source):
            each.connector.quiesce(ID)
    assert len([each for each in threading.enumerate() if each.name == "kv-sink"]) == 1


def test_a_piece_is_part_of_the_source_rank(make: Callable[..., Rank]) -> None:
    sink, source = make(CpuIpcConnector), make(CpuIpcConnector)
    source.cache.copy_(torch.randn(source.cache.shape))
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    piece = Piece(0, 0, Rect(1, 3, 1, 2))
    source.connector.submit(SourceTransfer(ID, 1, ((piece, sink.connector.endpoint()),)))
    source.connector.ready(ID, BlockRun(0, 2), (5, 6), True)
    source.expect(Sent)
    wait_until(lambda: sink.connector.counts["bytes"] > 0)
    expected = torch.zeros_like(sink.cache)
    expected[1:3, :, list(SINK_IDS[:2]), 1:2] = source.cache[1:3, :, [5, 6], 1:2]
    assert torch.equal(sink.cache, expected)


@pytest.mark.parametrize("part", [0, 7])
def test_the_announcing_thread_offers_a_run_if_the_worker_has_nothing_to_do(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The socket takes the whole offer, or a part of it and the worker sends the rest."""
    send_now, offered = SocketPipe.send_now, []

    def note(self: SocketPipe, data: bytes) -> int:
        offered.append(threading.current_thread())
        return send_now(self, data[:part] if part else data)

    monkeypatch.setattr(SocketPipe, "send_now", note)
    sink, source = make(ShmConnector), make(ShmConnector)
    source.cache.copy_(torch.randn(source.cache.shape))
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    submit(source, sink)
    for run, ids in ((BlockRun(0, 3), (8, 1, 2)), (BlockRun(3, 1), (0,))):
        wait_until_idle(source)
        source.connector.ready(ID, run, ids, run.first == 3)
    assert sink.expect(Landed).nbytes == source.expect(Sent).nbytes
    assert torch.equal(sink.cache[:, :, list(SINK_IDS)], source.cache[:, :, [8, 1, 2, 0]])
    assert offered == 2 * [threading.current_thread()]


def test_an_offer_that_is_given_up_at_once_leaves_the_connection_in_order(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink answers it, so the worker reads the answer even though the transfer is over."""
    go_on, deliver = threading.Event(), base_channel.Channel.deliver

    def late(self: base_channel.Channel, *args: Any) -> int:
        assert go_on.wait(30)
        return deliver(self, *args)

    monkeypatch.setattr(base_channel.Channel, "deliver", late)
    sink, source = make(ShmConnector), make(ShmConnector, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    submit(source, sink)
    wait_until_idle(source)
    source.connector.ready(ID, BlockRun(0, 2), (5, 6), False)
    source.connector.quiesce(ID)
    sink.connector.quiesce(ID)
    go_on.set()
    other = ID[::-1]
    sink.connector.accept(SinkTransfer(other, 1, 0, SINK_IDS))
    submit(source, sink, other)
    source.connector.ready(other, BlockRun(0, 4), (0, 1, 2, 3), True)
    assert sink.expect(Landed).transfer_id == source.expect(Sent).transfer_id == other
    assert (sink.cache[:, :, list(SINK_IDS)] == 1).all()
    assert sink.connector.counts["PEER_LOST"] == 0


def wait_until_idle(source: Rank) -> None:
    """Waits until the source's worker has announced a piece and waits for work."""
    (worker,) = source.connector.sender._workers.values()
    wait_until(lambda: worker._live and worker.queue._waits and worker.queue.empty())


@pytest.mark.parametrize(
    ("kind", "held"),
    [(CpuIpcConnector, None), (ShmConnector, None), (ShmConnector, "given up"), (ShmConnector, 2)],
)
def test_a_read_counts_only_when_it_is_confirmed(
    make: Callable[..., Rank], kind: type[KVConnector], held: Any
) -> None:
    """Also when the source holds another epoch, or has given this one up."""
    sink, source = make(kind), make(kind, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    if held:
        source.connector.submit(SourceTransfer(ID, 1 if held == "given up" else held, ()))
    if held == "given up":
        source.connector.quiesce(ID)
    pipe, offer = read_before_it_is_confirmed(source, sink)
    send_frame(pipe, replace(offer, kind=FrameKind.CONFIRM, count=0))
    failed = sink.expect(Failed)
    assert (failed.code, failed.blame, failed.retryable) == ("EXPIRED", "prefill", True)
    pipe.close()


@pytest.mark.parametrize("kind", [ShmConnector, CpuIpcConnector])
def test_a_read_during_which_the_source_gave_it_up_does_not_count(
    make: Callable[..., Rank], kind: type[KVConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, recv = Gate(), pull.PullMover.recv

    def late(self: pull.PullMover, *args: Any) -> bool:
        gate.close()  # the source's
        return recv(self, *args)

    monkeypatch.setattr(pull.PullMover, "recv", late)
    sink, source = make(kind), make(kind, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    channel = source.connector.dial(sink.connector.endpoint())
    offer = Frame(FrameKind.OFFER, ID, 1, RECT, 0, 4)
    assert channel.deliver(offer, (0, 1, 2, 3), gate) == 0
    assert sink.expect(Failed).code == "EXPIRED"
    channel.close()


def test_a_read_of_what_is_surely_held_counts_at_once(make: Callable[..., Rank]) -> None:
    sink, source = make(ShmConnector), make(ShmConnector, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    source.connector.submit(SourceTransfer(ID, 1, ()))
    pipe, offer = read_before_it_is_confirmed(source, sink)
    assert sink.expect(Landed).nbytes == piece_nbytes(sink.cache, RECT, 4)
    send_frame(pipe, replace(offer, kind=FrameKind.CONFIRM, count=0))  # given up since
    send_frame(pipe, Frame(FrameKind.BEGIN, ID, 1, RECT))  # the connection goes on
    assert sink.expect(Progress).nbytes == 0
    pipe.close()


def read_before_it_is_confirmed(source: Rank, sink: Rank) -> tuple[SocketPipe, Frame]:
    pipe = source.connector.connect(sink.connector.endpoint())
    source.connector.introduce(pipe)
    assert recv_frame(pipe).kind is FrameKind.WELCOME
    offer = Frame(FrameKind.OFFER, ID, 1, RECT, 0, 4, 16)
    send_frame(pipe, offer, bytes(16))
    assert recv_frame(pipe).kind is FrameKind.TAKEN
    return pipe, offer


def test_a_table_of_holds_has_what_is_held_now() -> None:
    holds = Holds()
    seen = PeerHolds(holds.fd)
    assert not seen.has(ID, 1) and not seen.has(bytes(16), 1)
    holds.enter(ID, 1)
    neighbour = ID[:4] + bytes(12)  # the same place: it is asked for
    holds.enter(neighbour, 1)
    holds.enter(ID, 2)  # not before the first is over
    assert [seen.has(ID, epoch) for epoch in (1, 2)] == [True, False]
    assert not seen.has(neighbour, 1)
    holds.take_out(neighbour)
    assert seen.has(ID, 1)
    holds.take_out(ID)
    holds.take_out(ID)
    assert not seen.has(ID, 1)
    holds.enter(neighbour, 3)
    assert seen.has(neighbour, 3) and not seen.has(ID, 3)
    holds.close()
    holds.close()
    assert not seen.has(neighbour, 3)
    holds.enter(ID, 4)
    holds.take_out(ID)
    assert not seen.has(ID, 4)


def test_a_closed_table_keeps_no_descriptor_while_somebody_has_it() -> None:
    """A closed connector is part of cycles, which the collector may not come to for minutes."""
    holds = Holds()
    table = file_of(holds.fd)
    assert opened().count(table) > 1
    holds.close()
    assert table not in opened()


def opened() -> list[tuple[int, int]]:
    """The files behind this process's descriptors."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the list's own
            files.append(file_of(int(fd)))
    return files


def file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def test_a_table_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("no-table", os.MFD_ALLOW_SEALING)
    with pytest.raises(ValueError, match="not sealed"):
        PeerHolds(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError):  # it is too short
        PeerHolds(fd)
    os.close(fd)


def test_a_peer_of_another_user_is_refused(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells its user, so it takes neither a slot nor a thread, on either side."""
    sink, source = make(ShmConnector), make(ShmConnector)
    sink.connector.endpoint()
    monkeypatch.setattr(pull.os, "geteuid", lambda: 4711)
    submit(source, sink)
    failed = source.expect(Failed)
    assert failed.code == "CONNECT_FAILED"
    assert "not 4711" in failed.message
    wait_until(lambda: sink.connector.counts["refused_connection"] == 1)
    assert not [each for each in threading.enumerate() if each.name == "kv-sink"]


# ---- CUDA IPC ----


def test_memory_that_cannot_be_opened_is_told_to_the_source(make: Callable[..., Rank]) -> None:
    sink, source = make(Unreachable), make(CpuIpcConnector)
    submit(source, sink)
    failed = source.expect(Failed)
    assert (failed.code, failed.retryable) == ("CONNECT_FAILED", False)
    assert "peer access is not supported): are both GPUs on this host" in failed.message
    wait_until(lambda: sink.connector.counts["CONNECT_FAILED"] == 1)


def test_a_cache_within_a_larger_storage() -> None:
    whole = torch.randn(7 + SHAPE.numel())
    theirs = whole[7:].view(SHAPE)
    ours = torch.zeros(SHAPE)
    greeting = ipc_greeting(whole.untyped_storage(), offset=7)
    OpenedCache(greeting, whole.untyped_storage(), CacheView(ours, RECT)).copy(
        RECT, [3], [4], FrameHash({})
    )
    assert torch.equal(ours[:, :, 4], theirs[:, :, 3])


@pytest.mark.parametrize(
    "lie", [{"num_blocks": 17}, {"offset": 1}, {"offset": -1}, {"rect": Rect(2, 1, 0, 2)}]
)
def test_a_cache_must_fit_its_memory(lie: dict[str, Any]) -> None:
    storage = torch.zeros(SHAPE).untyped_storage()
    with pytest.raises(TransferError, match=r"BAD_FRAME.*does not fit"):
        OpenedCache(ipc_greeting(storage, **lie), storage, CacheView(torch.zeros(SHAPE), RECT))


def test_misconfiguration_is_told_at_start() -> None:
    view = CacheView(torch.zeros(SHAPE), RECT)
    context = RankContext(view, "127.0.0.1", "same", lambda event: None)
    with pytest.raises(ConfigError, match="CudaIpcConnector cannot move KV of a cpu cache: choose"):
        CudaIpcConnector(context, {})
    with pytest.raises(ConfigError, match="no option 'streams'"):
        CpuIpcConnector(context, {"streams": 1})
    with pytest.raises(ConfigError, match=r"operation not supported.*choose another"):
        Unshareable(context, {})
