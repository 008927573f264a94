"""How fast KV blocks move between two processes of this host, connector by connector.

Each figure stands beside two limits measured in the same run: a plain memory copy and a plain
loopback socket. Every transfer is made twice, in turn without and with digests; what they cost is
the median ratio of such pairs. Prints a table; `--json FILE` also writes the figures.

    python benchmarks/bench_transfer.py [--connectors shm,tcp] [--seconds 1.5] [--json out.json]
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
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch
from limits import memcpy_limit, socket_limit
from rich.console import Console
from rich.table import Table

from pdserve.kv_transfer.commands import (
    Accept,
    Command,
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
from pdserve.kv_transfer.rank.digester import Digester
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
    Shape("SmolLM2 fp32, 2000 tok", 30, 3, 64, "float32", 125),
    Shape("8B bf16, 1000 tok", 32, 8, 128, "bfloat16", 63, num_blocks=256),
    Shape("8B bf16 TP8, 1000 tok", 32, 1, 128, "bfloat16", 63),
)


@dataclass(frozen=True)
class Result:
    connector: str
    shape: str
    gb_per_s: float  # median
    of_memcpy: float
    of_socket: float
    one_block_us: float  # median, announced → commit answered
    cpu_s_per_gb: float  # both processes
    hash_gb_per_s: float  # of one thread over the prompt's blocks
    hash_of_memcpy: float
    with_digests: float  # time with ÷ time without, median of pairs


@dataclass(frozen=True)
class Sample:
    """One transfer."""

    seconds: float  # from the first run announced to the commit's answer
    cpu: float  # seconds of both processes


def make_view(shape: Shape) -> CacheView:
    nbytes = shape.num_blocks * shape.block_nbytes
    fd = os.memfd_create("bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or no sink would map it
    cache = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=shape.torch_dtype)
    cache.fill_(1)  # touch every page
    return CacheView(
        cache.view(shape.cache_shape), Rect(0, shape.layers, 0, shape.heads), shared_fd=fd
    )


def make_rank(
    name: str, view: CacheView, *, source: bool
) -> tuple[TransferRank, queue.SimpleQueue[Event]]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    context = RankContext(view, "127.0.0.1", "bench", events.put)
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
        call(rank, Accept(SinkTransfer(transfer_id, 1, 0, fragmented(shape, count, seed=2))))
        control.send_bytes(b"accepted")
        commit = msgspec.msgpack.decode(control.recv_bytes(), type=Verify)
        while not isinstance(event := events.get(), Landed):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        if commit.digests:
            verify(rank, commit)
        control.send_bytes(b"committed")
        call(rank, Release(transfer_id))
        control.send_bytes(str(time.process_time() - started).encode())
    rank.close(2.0)


def fragmented(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    """Physical blocks in no order, as after hours of serving."""
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

    def transfer(self, count: int, digests: bool) -> Sample:
        transfer_id = os.urandom(16)
        self._control.send_bytes(transfer_id + str(count).encode())
        self._control.recv_bytes()
        started, cpu = time.perf_counter(), time.process_time()
        pieces = ((self._piece, self._endpoint),)
        call(self._rank, Submit(SourceTransfer(transfer_id, 1, pieces)))
        made = self._announce(transfer_id, count, digests)
        self._control.send_bytes(msgspec.msgpack.encode(Verify(transfer_id, made)))
        self._control.recv_bytes()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        call(self._rank, Release(transfer_id))
        return Sample(seconds, cpu + float(self._control.recv_bytes()))

    def _announce(self, transfer_id: bytes, count: int, digests: bool) -> tuple[RunDigest, ...]:
        ids = fragmented(self._shape, count, seed=1)
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


def measure(bench: Bench, count: int, seconds: float) -> list[tuple[Sample, Sample]]:
    """Pairs of transfers without and with digests, made in turn."""
    bench.transfer(count, digests=True)  # connect, touch
    pairs: list[tuple[Sample, Sample]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        first = bench.transfer(count, digests=len(pairs) % 2 == 1)
        second = bench.transfer(count, digests=len(pairs) % 2 == 0)
        pairs.append((first, second) if len(pairs) % 2 == 0 else (second, first))
    return pairs


def run(name: str, shape: Shape, seconds: float, memcpy: float, loopback: float) -> Result:
    bench = Bench(name, shape)
    try:
        pairs = measure(bench, shape.prompt_blocks, seconds)
        single = measure(bench, 1, seconds / 4)
        hashing = hash_speed(bench.view, shape, seconds / 4)
    finally:
        bench.close()
    nbytes = shape.prompt_blocks * shape.block_nbytes
    speed = nbytes / statistics.median(plain.seconds for plain, _ in pairs) / 1e9
    return Result(
        name,
        shape.name,
        speed,
        speed / memcpy,
        speed / loopback,
        statistics.median(plain.seconds for plain, _ in single) * 1e6,
        statistics.mean(plain.cpu for plain, _ in pairs) / (nbytes / 1e9),
        hashing,
        hashing / memcpy,
        statistics.median(digested.seconds / plain.seconds for plain, digested in pairs),
    )


def hash_speed(view: CacheView, shape: Shape, seconds: float) -> float:
    """GB/s of one thread that makes the digests of a prompt."""
    digester, ids = Digester(view, "bench"), fragmented(shape, shape.prompt_blocks, seed=1)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        for first in range(0, len(ids), CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            digester.digest(bytes(16), 1, view.rect, BlockRun(first, len(part)), part)
        times.append(time.perf_counter() - started)
    return shape.prompt_blocks * shape.block_nbytes / statistics.median(times) / 1e9


def show(results: list[Result], memcpy: float, loopback: float) -> None:
    transfers = _table(
        f"limits: memcpy {memcpy:.1f} GB/s, loopback socket {loopback:.1f} GB/s",
        ("GB/s", "of memcpy", "of socket", "1 block", "CPU s/GB"),
    )
    digests = _table("digests", ("time with", "hash GB/s", "of memcpy"))
    for each in results:
        what = each.connector, each.shape
        ratios = f"{each.of_memcpy:.0%}", f"{each.of_socket:.0%}"
        figures = f"{each.one_block_us:.0f} µs", f"{each.cpu_s_per_gb:.2f}"
        transfers.add_row(*what, f"{each.gb_per_s:.2f}", *ratios, *figures)
        hashing = f"{each.hash_gb_per_s:.1f}", f"{each.hash_of_memcpy:.0%}"
        digests.add_row(*what, f"× {each.with_digests:.2f}", *hashing)
    Console().print(transfers, digests)


def _table(title: str, figures: tuple[str, ...]) -> Table:
    table = Table("connector", "shape", title=title)
    for column in figures:
        table.add_column(column, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connectors", default="shm,tcp", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=1.5, help="per connector and shape")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memcpy, loopback = memcpy_limit(args.seconds / 2), socket_limit(args.seconds / 2)
    results = [
        run(name, shape, args.seconds, memcpy, loopback)
        for shape in SHAPES
        for name in args.connectors.split(",")
    ]
    show(results, memcpy, loopback)
    if args.json:
        limits = {"memcpy_gb_per_s": memcpy, "socket_gb_per_s": loopback}
        with open(args.json, "w") as file:
            json.dump({**limits, "results": [asdict(each) for each in results]}, file, indent=2)


if __name__ == "__main__":
    main()
