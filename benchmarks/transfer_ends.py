"""The two ends of `bench_transfer.py`: a source in this process, a sink in another, and the blocks
that they move."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import queue
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from pdserve.kv_transfer.commands import (
    Accept,
    Command,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
)
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Landed,
    RankContext,
    RunDigest,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.layout import CacheView, Piece, Rect
from pdserve.kv_transfer.rank.group_connector import GroupConnector
from pdserve.kv_transfer.selection import load_connector

CHUNK_BLOCKS = 32  # blocks per announcement: a prefill chunk of 512 tokens


@dataclass(frozen=True)
class Shape:
    """A rank's cache and a prompt."""

    name: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    prompt_blocks: int
    block_size: int = 16
    num_blocks: int = 512
    adjacent: bool = False  # whether the prompt's blocks are contiguous on both sides

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return (self.layers, 2, self.num_blocks, self.heads, self.block_size, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def planes(self) -> int:
        return 2 * self.layers

    @property
    def run_nbytes(self) -> int:
        """The contiguous bytes of a block within one plane."""
        return self.heads * self.block_size * self.head_dim * self.torch_dtype.itemsize

    @property
    def block_nbytes(self) -> int:
        return self.planes * self.run_nbytes


@dataclass(frozen=True)
class Sample:
    """One transfer."""

    seconds: float  # from the announcement of the first run to the commit's answer
    landed: float  # to the sink's `Landed`
    cpu: float = 0.0  # seconds of both processes


def make_view(shape: Shape) -> CacheView:
    nbytes = shape.num_blocks * shape.block_nbytes
    fd = os.memfd_create("bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or no sink would map it
    cache = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=shape.torch_dtype)
    cache.fill_(1)  # touch every page
    own = cache.view(shape.cache_shape)
    return CacheView(own, Rect(0, shape.layers, 0, shape.heads), shared_fd=fd)


def close_view(view: CacheView) -> None:
    assert view.shared_fd is not None
    os.close(view.shared_fd)


def make_rank(
    name: str, view: CacheView, *, source: bool
) -> tuple[GroupConnector, queue.SimpleQueue[Event | tuple[Landed, float]]]:
    """Returns a rank's connector; it reports `Landed` events with their time."""
    events: queue.SimpleQueue[Event | tuple[Landed, float]] = queue.SimpleQueue()

    def emit(event: Event) -> None:
        events.put((event, time.perf_counter()) if isinstance(event, Landed) else event)

    context = RankContext(view, "127.0.0.1", "bench", emit)
    return GroupConnector(load_connector(name)(context, {}), source), events


def call(rank: GroupConnector, command: Command) -> Reply:
    return rank.handle(command)


def verify(rank: GroupConnector, commit: Verify) -> None:
    """Verifies digests like a decode node, until all are compared."""
    reply = call(rank, commit)
    while reply.left and not reply.digests:
        start = len(commit.digests) - reply.left
        reply = call(rank, Verify(commit.transfer_id, 1, commit.digests, start))
    if reply.digests:
        raise RuntimeError("the digests differ")


def sink_process(name: str, shape: Shape, control: Connection) -> None:
    """Runs the sink: accepts transfers, and answers each commit once it has landed and matches."""
    torch.set_num_threads(1)
    rank, events = make_rank(name, make_view(shape), source=False)
    control.send_bytes(rank.endpoint)
    while message := control.recv_bytes():
        started = time.process_time()
        transfer_id, digests, count = message[:16], message[16:17] == b"d", int(message[17:])
        ids = block_ids(shape, count, seed=2)
        call(rank, Accept(SinkTransfer(transfer_id, 1, 0, ids, digests)))
        control.send_bytes(b"accepted")
        commit = msgspec.msgpack.decode(control.recv_bytes(), type=Verify)
        while not isinstance(event := events.get(), tuple):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        if commit.digests:
            verify(rank, commit)
        control.send_bytes(b"verified")
        call(rank, Release(transfer_id))
        cpu = time.process_time() - started
        control.send_bytes(msgspec.msgpack.encode((event[1], cpu)))
    rank.close(2.0)


@cache
def block_ids(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    """Returns physical blocks in random order, as after hours of serving, or contiguous ones."""
    if shape.adjacent:
        return tuple(range(seed, seed + count))
    order = np.random.default_rng(seed).permutation(shape.num_blocks)
    return tuple(order[:count].tolist())


class Pair:
    """A source in this process and a sink in another."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._shape = shape
        self._control, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=sink_process, args=(name, shape, theirs))
        self._process.start()
        theirs.close()  # so that the end of the sink is noticed
        self.view = make_view(shape)
        self._rank, self._events = make_rank(name, self.view, source=True)
        self._endpoint = self._control.recv_bytes()
        self._piece = Piece(0, 0, Rect(0, shape.layers, 0, shape.heads))

    def transfer(self, count: int, digests: bool, pause: float = 0.0) -> Sample:
        """Runs one transfer; `pause`: idle seconds before its first run."""
        transfer_id = os.urandom(16)
        self._control.send_bytes(transfer_id + (b"d" if digests else b"-") + str(count).encode())
        self._control.recv_bytes()
        pieces = ((self._piece, self._endpoint),)
        cpu = time.process_time()
        call(self._rank, Submit(SourceTransfer(transfer_id, 1, pieces)))
        time.sleep(pause)
        started = time.perf_counter()
        made = self._announce(transfer_id, count, digests)
        self._control.send_bytes(msgspec.msgpack.encode(Verify(transfer_id, 1, made)))
        self._control.recv_bytes()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        call(self._rank, Release(transfer_id))
        landed, theirs = msgspec.msgpack.decode(self._control.recv_bytes())
        return Sample(seconds, landed - started, cpu + theirs)

    def _announce(self, transfer_id: bytes, count: int, digests: bool) -> tuple[RunDigest, ...]:
        ids = block_ids(self._shape, count, seed=1)
        made: tuple[RunDigest, ...] = ()
        later = False
        for first in range(0, count, CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            last = first + len(part) == count
            run = BlockRun(first, len(part))
            reply = call(self._rank, Ready(transfer_id, run, part, last, digests))
            made, later = made + reply.digests, later or reply.hashed_as_sent
        made += self._sent_digests(transfer_id) if later else ()
        return tuple(sorted(made, key=lambda digest: digest.run.first))

    def _sent_digests(self, transfer_id: bytes) -> tuple[RunDigest, ...]:
        while True:
            event = self._events.get()
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Sent) and event.transfer_id == transfer_id:
                return event.digests

    def close(self) -> None:
        self._control.send_bytes(b"")
        self._rank.close(2.0)
        self._process.join()
        close_view(self.view)
