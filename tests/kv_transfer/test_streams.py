"""Connectors touch a CUDA cache on streams of their own. Fakes stand for streams; the caches are on
a CPU. Nothing here has run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from connector_ranks import GEOMETRY, ID, RECT
from fake_streams import FakeStreams, Watch
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.connectors import cuda_ipc
from pdserve.kv_transfer.connectors.base import channel, pull
from pdserve.kv_transfer.connectors.base.channel import FrameHash
from pdserve.kv_transfer.connectors.nccl import connector as nccl
from pdserve.kv_transfer.connectors.nccl import group
from pdserve.kv_transfer.connectors.nccl.group import NcclPair
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.rank import digester

IDS = (8, 1, 2)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    found = FakeStreams()
    for module in (channel, pull, cuda_ipc, nccl, digester):
        monkeypatch.setattr(module, "OwnStream", found)
    return found


class Wire:
    """A pipe, and a pair's group: moves nothing but takes and gives bytes of the right size."""

    def send_tensor(self, tensor: torch.Tensor) -> None:
        self.last = tensor.clone()

    send = send_tensor

    def recv_tensor(self, tensor: torch.Tensor) -> None:
        tensor.fill_(1)

    recv = recv_tensor

    def send_bytes(self, data: bytes) -> None:
        self.last = data  # type: ignore[assignment]


def view() -> CacheView:
    return CacheView(torch.randn(GEOMETRY.shape(RECT)), RECT)


def frame(mover: channel.Mover) -> Frame:
    nbytes = mover.payload_nbytes(RECT, len(IDS))
    return Frame(mover.kind, ID, 1, RECT, 0, len(IDS), nbytes)


def staged_mover(monkeypatch: pytest.MonkeyPatch, where: CacheView, wire: Any) -> channel.Mover:
    """Makes what tcp has for a CUDA cache, with staging memory that is not pinned."""
    mover = channel.PipeMover(where, wire)
    mover._on_host = False
    staging = torch.empty(channel.FRAME_NBYTES, dtype=torch.uint8)
    monkeypatch.setattr(mover, "_staging", lambda nbytes: staging[:nbytes])
    return mover


@pytest.mark.parametrize("kind", ["tcp", "nccl"])
def test_fake_streams_carry_all_that_is_pushed(
    kind: str, streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, wire = view(), Wire()
    unused: Any = wire
    if kind == "tcp":
        mover = staged_mover(monkeypatch, where, wire)
    else:
        mover = nccl.GroupMover(where, unused, unused)
    with Watch(streams, where.cache):
        assert mover.send(frame(mover), IDS, Gate())
        assert mover.recv(frame(mover), IDS, Gate())
    assert streams.touched == ["read", "write"]
    streams.check()
    assert (where.cache[:, :, list(IDS)].view(torch.uint8) == 1).all()


def test_fake_streams_carry_all_that_is_pulled(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source waits for its own steps before it offers; the sink copies."""
    theirs, ours, unused = view(), view(), None
    storage = theirs.cache.untyped_storage()
    handle: Any = unused
    greeting = cuda_ipc.Greeting("same", RECT, GEOMETRY.num_blocks, handle, 0)
    peer = cuda_ipc.OpenedCache(greeting, storage, ours)
    pipe: Any = Wire()
    mover = pull.PullMover(theirs, pipe, None)
    monkeypatch.setattr(pull, "recv_frame", lambda _: Frame(FrameKind.TAKEN))
    with Watch(streams, ours.cache, theirs.cache):
        assert mover.send(frame(mover), IDS, Gate())
        peer.copy(RECT, IDS, (0, 3, 4), FrameHash({}))
    assert streams.touched == ["read", "write"]
    assert streams.queued[0][0] == "sync"
    streams.check()
    torch.testing.assert_close(ours.cache[:, :, [0, 3, 4]], theirs.cache[:, :, list(IDS)])


def test_fake_streams_carry_what_digests_read(streams: FakeStreams) -> None:
    where = view()
    one = digester.Digester(where, "same")
    expected = one.digest(ID, 1, RECT, BlockRun(0, 3), IDS)
    one._on_host = False
    with Watch(streams, where.cache):
        assert one.digest(ID, 1, RECT, BlockRun(0, 3), IDS) == expected
    assert streams.touched == ["read"]
    streams.check()


def test_the_recorder_sees_what_is_on_the_model_s_stream(streams: FakeStreams) -> None:
    where = view()
    with Watch(streams, where.cache), pytest.raises(AssertionError, match="model's stream"):
        where.cache[:, :, [1, 2]] = 0
        streams.check()


class FakeClock:
    """A host's clock: a sleep takes 60 µs longer than asked, a look at a part 2 µs."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 60e-6


class FakeWork:
    """A part that is on its way until `done`; how often was looked."""

    def __init__(self, clock: FakeClock, done: float) -> None:
        self._clock, self._done = clock, done
        self.looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        self._clock.now += 2e-6
        return self._clock.now >= self._done

    def wait(self, timeout: timedelta) -> None:
        assert self.is_completed()


class FakePoll:
    def poll(self, milliseconds: int) -> list[int]:
        assert milliseconds == 0, "it waits for a hang-up, not for the part"
        return []


@pytest.mark.parametrize("seconds", [1e-6, 0.2e-3, 1e-3, 20e-3, 1.0])
def test_a_fake_nccl_part_is_noticed_soon_and_seldom_looked_for(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(group, "time", clock)
    pair: Any = object.__new__(NcclPair)
    pair._stall, pair._hangup = timedelta(seconds=5), FakePoll()
    work: Any = FakeWork(clock, seconds)
    pair._wait(work)
    assert clock.now <= 1.15 * seconds + 75e-6
    assert work.looks <= 60 + seconds / 1e-3


def test_a_fake_nccl_part_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(group, "time", clock)
    pair: Any = object.__new__(NcclPair)
    pair._stall, pair._hangup = timedelta(seconds=5), FakePoll()
    work: Any = FakeWork(clock, 100.0)
    with pytest.raises(ConnectionError, match=r"nothing came for 5\.0 s"):
        pair._wait(work)
    assert 5 < clock.now < 5.01


class FakeCudaStream:
    def __init__(self, device: object, queued: list[str]) -> None:
        self._queued = queued

    def wait_stream(self, other: str) -> None:
        self._queued.append(f"wait for {other}")

    def synchronize(self) -> None:
        self._queued.append("synchronize")


def test_a_connector_s_fake_stream_waits_for_the_steps_queued_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would read blocks that the device has yet to compute."""
    queued: list[str] = []

    @contextmanager
    def active(stream: FakeCudaStream) -> Iterator[None]:
        queued.append("own")
        yield
        queued.append("the model's")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeCudaStream(device, queued))
    monkeypatch.setattr(torch.cuda, "stream", active)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the steps of {device}")
    own = channel.OwnStream(torch.device("cuda", 1))
    with own.active():
        queued.append("copy")
    own.synchronize()
    waits = "wait for the steps of cuda:1"
    assert queued == ["own", waits, "copy", "the model's", "synchronize"]
