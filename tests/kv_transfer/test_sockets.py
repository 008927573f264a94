"""Blocks through sockets, by compiled code or without, hashed as they move or not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash

from compiled import use_compiled_code
from pdserve.kv_transfer.blocks import BlockLayout, ByteRuns, CacheBytes, RunsHash, memory_of
from pdserve.kv_transfer.blocks import byte_runs as runs_of
from pdserve.kv_transfer.connectors.base import sockets
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect

RECT = Rect(0, 2, 0, 2)
PREFIX, HEADER = b"a prefix", b"a header"


@pytest.fixture(params=[True, False], ids=["compiled", "not compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    use_compiled_code(request.param, monkeypatch)
    monkeypatch.setattr(sockets, "HOT_NBYTES", 1000)
    return bool(request.param)


@pytest.fixture
def ends(compiled: bool) -> Iterator[tuple[SocketPipe, SocketPipe]]:
    """Their buffers are so small that most calls move a part of what they could."""
    made = socket.socketpair()
    for each in made:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    pipes = SocketPipe(made[0]), SocketPipe(made[1])
    yield pipes
    for pipe in pipes:
        pipe.close()


class Side:
    """A cache, and every second of its blocks."""

    def __init__(self, cache: torch.Tensor) -> None:
        view = CacheView(cache, RECT)
        self.cache, self.memory = cache, memory_of(cache)
        self.bytes = CacheBytes.of(self.memory, BlockLayout.of(view))
        self.runs = runs_of(view, RECT, tuple(range(0, cache.shape[2], 2)))

    @property
    def data(self) -> bytes:
        return self.cache[:, :, ::2].contiguous().numpy().tobytes()

    def hash(self) -> RunsHash:
        return RunsHash(PREFIX, self.bytes, len(self.data))

    @property
    def right_hash(self) -> bytes:
        return xxhash.xxh3_128(PREFIX + self.data).digest()


@pytest.mark.parametrize("num_blocks", [2, 800])  # one range a plane; more than a call takes
@pytest.mark.parametrize("hashed", [True, False])
def test_blocks_move_and_are_hashed_where_they_lie(
    ends: tuple[SocketPipe, SocketPipe], num_blocks: int, hashed: bool
) -> None:
    shape = (2, 2, num_blocks, 2, 4, 8)
    ours, theirs = Side(torch.randn(shape)), Side(torch.zeros(shape))
    made = ours.hash(), theirs.hash()

    def send() -> None:
        ends[0].send_header(HEADER)
        assert ends[0].send_blocks(ours.memory, ours.runs, Gate(), made[0] if hashed else None)
        ends[0].send_bytes(HEADER)

    sender = threading.Thread(target=send)
    sender.start()
    assert ends[1].recv_bytes(len(HEADER)) == HEADER
    assert ends[1].recv_blocks(theirs.memory, theirs.runs, Gate(), made[1] if hashed else None)
    assert ends[1].recv_bytes(len(HEADER)) == HEADER
    sender.join()
    assert theirs.data == ours.data
    assert not theirs.cache[:, :, 1::2].any()
    if hashed:
        assert [each.digest() for each in made] == 2 * [ours.right_hash]


def test_a_hash_is_of_what_arrived(ends: tuple[SocketPipe, SocketPipe]) -> None:
    """Not of what was sent."""
    ours = Side(torch.randn(2, 2, 20, 2, 4, 8))
    data = bytearray(ours.data)
    data[-1] ^= 1
    sender = threading.Thread(target=ends[0].send_bytes, args=(bytes(data),))
    sender.start()
    theirs = Side(torch.zeros_like(ours.cache))
    made = theirs.hash()
    assert ends[1].recv_blocks(theirs.memory, theirs.runs, Gate(), made)
    sender.join()
    assert made.digest() == theirs.right_hash != ours.right_hash


def test_a_closed_gate_ends_a_frame_with_other_bytes(
    ends: tuple[SocketPipe, SocketPipe],
) -> None:
    """The gate closes when a part has gone out; the connection serves the next frame."""
    ours, gate = Side(torch.ones(2, 2, 800, 2, 4, 8)), Gate()
    sent: list[bool] = []

    def send() -> None:
        ends[0].send_header(HEADER)
        sent.append(ends[0].send_blocks(ours.memory, ours.runs, gate, ours.hash()))
        ends[0].send_bytes(HEADER)

    sender = threading.Thread(target=send)
    sender.start()
    assert ends[1].recv_bytes(len(HEADER)) == HEADER
    gate.close()
    ours.cache.fill_(7)  # as another sequence may, now
    data = np.frombuffer(ends[1].recv_bytes(len(ours.data)), np.float32)
    assert ends[1].recv_bytes(len(HEADER)) == HEADER
    sender.join()
    assert sent == [False] and not (data == 7).any()


def test_ranges_beyond_the_memory_are_refused(ends: tuple[SocketPipe, SocketPipe]) -> None:
    """By compiled code, which checks them; views of Python end with the memory."""
    side = Side(torch.zeros(2, 2, 4, 2, 4, 8))
    beyond = ByteRuns(side.runs.offsets + len(side.memory), side.runs.lengths)
    if ends[0]._code() is not None:
        with pytest.raises(IndexError):
            ends[0].send_blocks(side.memory, beyond, Gate())


def test_a_peer_that_closes_within_a_frame_is_lost(
    ends: tuple[SocketPipe, SocketPipe],
) -> None:
    side = Side(torch.zeros(2, 2, 800, 2, 4, 8))
    ends[0].send_bytes(b"a part")
    ends[0].interrupt()
    with pytest.raises(ConnectionError, match="closed"):
        ends[1].recv_blocks(side.memory, side.runs, Gate(), side.hash())
    with pytest.raises(ConnectionError):
        ends[1].send_blocks(side.memory, side.runs, Gate(), side.hash())
