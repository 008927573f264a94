"""How fast KV blocks move between two processes of this host, connector by connector, and how soon
one small block is there.

Rounds of a plain memory copy, a transfer without and one with digests take turns; now and then a
plain loopback socket comes between them. What else a host does only ever makes a round slower: a
figure is the fastest tenth of its rounds, and ratios are of such figures of one run. Latencies are
from the run announced to the sink's `Landed`, on an idle connection. What copying and hashing alone
take is CPU time (`--connectors ""`: nothing else). Prints tables; `--json FILE` also writes the
figures.

    python benchmarks/bench_transfer.py [--connectors shm,shared,tcp] [--seconds 1.5] [--json FILE]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch
from limits import socket_limit
from rich.console import Console
from rich.table import Table

from pdserve.common.worker.guest_area import GuestArea
from pdserve.kv_transfer.blocks import CacheBytes, Placement, copy_blocks, memory_of
from pdserve.kv_transfer.commands import (
    Accept,
    Borrow,
    Command,
    GiveBack,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
    VerifyMore,
)
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Landed,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import CacheView, Piece, Rect
from pdserve.kv_transfer.rank.digester import Digester, Hashed
from pdserve.kv_transfer.rank.transfer_rank import TransferRank
from pdserve.kv_transfer.selection import load_connector

CHUNK_BLOCKS = 32  # blocks announced at once: a prefill chunk of 512 tokens


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
    adjacent: bool = False  # the prompt's blocks, on both sides

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return (self.layers, 2, self.num_blocks, self.heads, self.block_size, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def block_nbytes(self) -> int:
        per_layer = self.heads * self.block_size * self.head_dim * self.torch_dtype.itemsize
        return 2 * self.layers * per_layer


SHAPES = (
    Shape("8B bf16 TP8: 4 KiB runs", 32, 1, 128, "bfloat16", 250),
    Shape("the same, adjacent", 32, 1, 128, "bfloat16", 250, adjacent=True),
    Shape("SmolLM2 fp32: 12 KiB runs", 30, 3, 64, "float32", 90, num_blocks=256),
    Shape("8B bf16: 32 KiB runs", 32, 8, 128, "bfloat16", 32, num_blocks=128),
    Shape("64 KiB runs", 8, 16, 128, "bfloat16", 64, num_blocks=256),
    Shape("1 MiB runs", 2, 128, 256, "bfloat16", 16, num_blocks=64),
)
SMALL = (
    Shape("4 KiB in 2 runs", 1, 1, 64, "bfloat16", 1),
    Shape("64 KiB in 16 runs", 8, 1, 128, "bfloat16", 1),
    Shape("0.25 MiB in 64 runs", 32, 1, 128, "bfloat16", 1),
)


@dataclass(frozen=True)
class Throughput:
    connector: str
    shape: str
    gb_per_s: float
    of_memcpy: float
    of_socket: float
    cpu_s_per_gb: float  # both processes
    with_digests: float  # time with ÷ time without
    hash_gb_per_s: float  # of a rank that makes the digests of a prompt
    hash_of_memcpy: float
    copied: float  # of the prompt's blocks: what is read in place counts in GB/s all the same


@dataclass(frozen=True)
class Latency:
    """Of one block, µs."""

    connector: str
    shape: str
    fastest: float
    p50: float
    p99: float
    committed_p50: float  # until the commit is answered
    digests_p50: float  # the same with digests
    memcpy: float  # the fastest copy of as many bytes


@dataclass(frozen=True)
class Sample:
    """One transfer."""

    seconds: float  # from the first run announced to the commit's answer
    landed: float  # ... to the sink's event
    cpu: float  # seconds of both processes
    borrowed: int  # blocks that were not copied


def make_view(shape: Shape) -> CacheView:
    nbytes = shape.num_blocks * shape.block_nbytes
    fd = os.memfd_create("bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or no sink would map it
    cache = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=shape.torch_dtype)
    cache.fill_(1)  # touch every page
    own = cache.view(shape.cache_shape)
    area = GuestArea(fd, own)  # for connectors that lend
    return CacheView(own, Rect(0, shape.layers, 0, shape.heads), shared_fd=fd, guests=area)


def make_rank(
    name: str, view: CacheView, *, source: bool
) -> tuple[TransferRank, queue.SimpleQueue[Event | tuple[Landed, float]]]:
    """Its events come as they are, but `Landed` with the moment it was told."""
    events: queue.SimpleQueue[Event | tuple[Landed, float]] = queue.SimpleQueue()

    def emit(event: Event) -> None:
        events.put((event, time.perf_counter()) if isinstance(event, Landed) else event)

    context = RankContext(view, "127.0.0.1", "bench", emit)
    return TransferRank(load_connector(name)(context, {}), source), events


def call(rank: TransferRank, command: Command) -> Reply:
    message = rank.handle(msgspec.msgpack.encode(command))
    reply = msgspec.msgpack.decode(message, type=Reply)
    if reply.error is not None:
        raise RuntimeError(reply.error.message)
    return reply


def verify(rank: TransferRank, commit: Verify) -> None:
    """As a decode node does it, step by step, to the end."""
    reply = call(rank, commit)
    while reply.left and not reply.digests:
        reply = call(rank, VerifyMore(commit.transfer_id, 1))
    if reply.digests:
        raise RuntimeError("the digests differ")


def sink_process(name: str, shape: Shape, control: Connection) -> None:
    """Accepts what it is told to, and answers each commit when it has landed and is verified."""
    torch.set_num_threads(1)
    rank, events = make_rank(name, make_view(shape), source=False)
    control.send_bytes(rank.info())
    while message := control.recv_bytes():
        started = time.process_time()
        transfer_id, count = message[:16], int(message[16:])
        call(rank, Accept(SinkTransfer(transfer_id, 1, 0, block_ids(shape, count, seed=2))))
        control.send_bytes(b"accepted")
        commit = msgspec.msgpack.decode(control.recv_bytes(), type=Verify)
        while not isinstance(event := events.get(), tuple):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        borrowed = event[0].borrowed
        if borrowed is not None:  # its lender's blocks come right behind this rank's own
            call(rank, Borrow(transfer_id, 1, shape.num_blocks))
        if commit.digests:
            verify(rank, commit)
        control.send_bytes(str(len(borrowed.blocks) if borrowed else 0).encode())
        call(rank, Release(transfer_id))
        if borrowed is not None:
            call(rank, GiveBack(borrowed.lender, (((transfer_id, 1), borrowed.blocks),)))
        cpu = time.process_time() - started
        control.send_bytes(msgspec.msgpack.encode((event[1], cpu)))
    rank.close(2.0)


@cache
def block_ids(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    """Physical blocks in no order, as after hours of serving, unless they shall be adjacent."""
    if shape.adjacent:
        return tuple(range(seed, seed + count))
    order = np.random.default_rng(seed).permutation(shape.num_blocks)
    return tuple(order[:count].tolist())


class Bench:
    """A source in this process, a sink in another."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._shape = shape
        self._control, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=sink_process, args=(name, shape, theirs))
        self._process.start()
        theirs.close()  # so that a sink that ends is seen
        self.view = make_view(shape)
        self._rank, _ = make_rank(name, self.view, source=True)
        self._endpoint = self._control.recv_bytes()
        self._piece = Piece(0, 0, Rect(0, shape.layers, 0, shape.heads))

    def transfer(self, count: int, digests: bool, pause: float = 0.0) -> Sample:
        """`pause`: seconds between the transfer's beginning and its first run."""
        transfer_id = os.urandom(16)
        self._control.send_bytes(transfer_id + str(count).encode())
        self._control.recv_bytes()
        pieces = ((self._piece, self._endpoint),)
        cpu = time.process_time()
        call(self._rank, Submit(SourceTransfer(transfer_id, 1, pieces, lend=True)))
        time.sleep(pause)
        started = time.perf_counter()
        made = self._announce(transfer_id, count, digests)
        self._control.send_bytes(msgspec.msgpack.encode(Verify(transfer_id, 1, made)))
        borrowed = int(self._control.recv_bytes())
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        call(self._rank, Release(transfer_id))
        landed, theirs = msgspec.msgpack.decode(self._control.recv_bytes())
        return Sample(seconds, landed - started, cpu + theirs, borrowed)

    def _announce(self, transfer_id: bytes, count: int, digests: bool) -> tuple[RunDigest, ...]:
        ids = block_ids(self._shape, count, seed=1)
        made: tuple[RunDigest, ...] = ()
        for first in range(0, count, CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            last = first + len(part) == count
            run = BlockRun(first, len(part))
            made += call(self._rank, Ready(transfer_id, run, part, last, digests)).digests
        return made

    def close(self) -> None:
        self._control.send_bytes(b"")
        self._rank.close(2.0)
        self._process.join()
        assert self.view.shared_fd is not None
        os.close(self.view.shared_fd)


def fastest(values: Iterable[float]) -> float:
    """The first decile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10]


def throughput(name: str, shape: Shape, seconds: float) -> Throughput:
    bench = Bench(name, shape)
    nbytes = shape.prompt_blocks * shape.block_nbytes
    copies, plain, digested, hashes = [], [], [], []
    streams: list[float] = []
    try:
        copy, make = copier(nbytes), hasher(bench.view, shape)
        bench.transfer(shape.prompt_blocks, digests=True)  # connect, touch
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(plain) < 3:
            if len(plain) % 8 == 0:
                streams.append(1 / socket_limit(0.05))
            copies.append(timed(copy))
            for digests in (False, True) if len(plain) % 2 else (True, False):
                samples = digested if digests else plain
                samples.append(bench.transfer(shape.prompt_blocks, digests))
            hashes.append(timed(make))
    finally:
        bench.close()
    gigabytes = nbytes / 1e9
    speed = gigabytes / fastest(each.seconds for each in plain)
    memcpy, hashing = gigabytes / fastest(copies), gigabytes / fastest(hashes)
    return Throughput(
        name,
        shape.name,
        speed,
        speed / memcpy,
        speed * fastest(streams),
        fastest(each.cpu for each in plain) / gigabytes,
        fastest(each.seconds for each in digested) * speed / gigabytes,
        hashing,
        hashing / memcpy,
        1 - plain[-1].borrowed / shape.prompt_blocks,
    )


@dataclass(frozen=True)
class Parts:
    """GB of a prompt per second of one thread's CPU time: the work itself, whoever else runs."""

    shape: str
    memcpy: float
    copy: float  # of its blocks to others
    hash: float


def parts(shape: Shape, seconds: float) -> Parts:
    source, target = make_view(shape), make_view(shape)
    count = shape.prompt_blocks
    theirs, ours = block_ids(shape, count, seed=1), block_ids(shape, count, seed=2)
    there, here = (
        CacheBytes.of(memory_of(view.cache), Placement.of(view)) for view in (source, target)
    )
    digester = Digester(source, "bench")
    works = (
        copier(count * shape.block_nbytes),
        partial(copy_blocks, source.rect, here, ours, there, theirs),
        partial(digester.digest, bytes(16), 1, source.rect, BlockRun(0, count), theirs),
    )
    times: list[list[float]] = [[], [], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for work, spent in zip(works, times, strict=True):
            spent.append(timed(work, time.thread_time))
    speeds = (count * shape.block_nbytes / 1e9 / fastest(spent) for spent in times)
    for view in (source, target):
        assert view.shared_fd is not None
        os.close(view.shared_fd)
    return Parts(shape.name, *speeds)


def latency(name: str, shape: Shape, seconds: float) -> Latency:
    bench = Bench(name, shape)
    plain, digested, copies = [], [], []
    try:
        copy = copier(shape.block_nbytes)
        bench.transfer(1, digests=True)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            plain.append(bench.transfer(1, digests=False, pause=0.001))
            digested.append(bench.transfer(1, digests=True, pause=0.001))
            copies.append(timed(copy))
    finally:
        bench.close()
    landed = sorted(each.landed * 1e6 for each in plain)
    return Latency(
        name,
        shape.name,
        landed[0],
        statistics.median(landed),
        landed[len(landed) * 99 // 100],
        statistics.median(each.seconds for each in plain) * 1e6,
        statistics.median(each.seconds for each in digested) * 1e6,
        fastest(copies) * 1e6,
    )


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    work()
    return clock() - started


def copier(nbytes: int) -> Callable[[], None]:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return partial(np.copyto, target, source)


def hasher(view: CacheView, shape: Shape) -> Callable[[], None]:
    """Makes the digests of a prompt, as a rank does."""
    digester, ids = Digester(view, "bench"), block_ids(shape, shape.prompt_blocks, seed=1)

    def make() -> None:
        for first in range(0, len(ids), CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            run = BlockRun(first, len(part))
            digester.digests(
                [Hashed(bytes(16), 1, band, run, part) for band in digester.bands(view.rect)]
            )

    return make


def show_parts(found: list[Parts]) -> None:
    table = Table("shape", title="the work of one thread, by CPU time")
    for column in ("memcpy GB/s", "copy ÷ memcpy", "hash ÷ memcpy"):
        table.add_column(column, justify="right")
    for each in found:
        ratios = each.copy / each.memcpy, each.hash / each.memcpy
        table.add_row(each.shape, f"{each.memcpy:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def show(throughputs: list[Throughput], latencies: list[Latency]) -> None:
    columns = "GB/s", "÷ memcpy", "÷ socket", "CPU s/GB", "with digests", "hash ÷ memcpy", "copied"
    table = _table("transfers", columns)
    for each in throughputs:
        ratios = f"{each.of_memcpy:.2f}", f"{each.of_socket:.2f}", f"{each.cpu_s_per_gb:.2f}"
        digests = f"× {each.with_digests:.2f}", f"{each.hash_of_memcpy:.2f}", f"{each.copied:.1%}"
        table.add_row(each.connector, each.shape, f"{each.gb_per_s:.2f}", *ratios, *digests)
    columns = "landed", "p50", "p99", "committed p50", "with digests", "memcpy"
    blocks = _table("one block, µs", columns)
    for one in latencies:
        times = one.fastest, one.p50, one.p99, one.committed_p50, one.digests_p50, one.memcpy
        blocks.add_row(one.connector, one.shape, *(f"{each:.0f}" for each in times))
    Console().print(table, blocks)


def _table(title: str, figures: tuple[str, ...]) -> Table:
    table = Table("connector", "shape", title=title)
    for column in figures:
        table.add_column(column, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connectors", default="shm,shared,tcp", help="names, separated by commas")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose names have it")
    parser.add_argument("--seconds", type=float, default=1.5, help="per connector and shape")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in args.connectors.split(",") if name]
    large, small = ([each for each in all_ if args.only in each.name] for all_ in (SHAPES, SMALL))
    alone = [parts(shape, args.seconds) for shape in large]
    show_parts(alone)
    moved = [throughput(name, shape, args.seconds) for shape in large for name in names]
    blocks = [latency(name, shape, args.seconds) for shape in small for name in names]
    show(moved, blocks)
    if args.json:
        figures = {"parts": alone, "throughput": moved, "latency": blocks}
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=2, default=asdict)


if __name__ == "__main__":
    main()
