"""How fast KV blocks move between two processes of this host, connector by connector.

Each figure stands beside two limits measured in the same run: a plain memory copy and a plain
loopback socket. Prints a table; `--json FILE` also writes the figures.

    python benchmarks/bench_transfer.py [--connectors shm,tcp] [--seconds 1.5] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import queue
import socket
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from common.core.plugins import resolve
from kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    KVConnector,
    Landed,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from kv_transfer.layout import CacheView, Piece, Rect
from kv_transfer.rank import BUILTIN, ENTRY_POINTS

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
    one_block_us: float  # median, announced → landed
    cpu_s_per_gb: float  # both processes


def make_connector(name: str, shape: Shape) -> tuple[KVConnector, queue.SimpleQueue[Event]]:
    nbytes = shape.num_blocks * shape.block_nbytes
    fd = os.memfd_create("bench-kv")
    os.ftruncate(fd, nbytes)
    cache = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=shape.torch_dtype)
    cache.fill_(1)  # touch every page
    view = CacheView(
        cache.view(shape.cache_shape), Rect(0, shape.layers, 0, shape.heads), shared_fd=fd
    )
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    context = RankContext(view, "127.0.0.1", "bench", events.put)
    return resolve(name, BUILTIN, ENTRY_POINTS)(context, {}), events


def sink_process(name: str, shape: Shape, control: Connection) -> None:
    """Accepts what it is told to, reports each landing."""
    torch.set_num_threads(1)
    connector, events = make_connector(name, shape)
    control.send_bytes(connector.endpoint())
    started = time.process_time()
    while command := control.recv_bytes():
        transfer_id, count = command[:16], int(command[16:])
        ids = fragmented(shape, count, seed=2)
        connector.accept(SinkTransfer(transfer_id, 1, 0, ids))
        control.send_bytes(b"accepted")
        while not isinstance(event := events.get(), Landed):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        control.send_bytes(b"landed")
        connector.release(transfer_id)
    control.send_bytes(str(time.process_time() - started).encode())
    connector.close(2.0)


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
        self._connector, _ = make_connector(name, shape)
        self._endpoint = self._control.recv_bytes()
        self._rect = Rect(0, shape.layers, 0, shape.heads)

    def transfer(self, count: int) -> float:
        """Seconds from the first run announced to the landing."""
        transfer_id = os.urandom(16)
        self._control.send_bytes(transfer_id + str(count).encode())
        self._control.recv_bytes()
        piece = Piece(0, 0, self._rect)
        ids = fragmented(self._shape, count, seed=1)
        started = time.perf_counter()
        self._connector.submit(SourceTransfer(transfer_id, 1, ((piece, self._endpoint),)))
        for first in range(0, count, CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            last = first + len(part) == count
            self._connector.ready(transfer_id, BlockRun(first, len(part)), part, last)
        self._control.recv_bytes()
        seconds = time.perf_counter() - started
        self._connector.release(transfer_id)
        return seconds

    def close(self) -> float:
        """CPU seconds of the sink."""
        self._control.send_bytes(b"")
        cpu = float(self._control.recv_bytes())
        self._connector.close(2.0)
        self._process.join()
        return cpu


def measure(bench: Bench, count: int, seconds: float) -> list[float]:
    bench.transfer(count)  # connect, touch
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(bench.transfer(count))
    return times


def run(name: str, shape: Shape, seconds: float, memcpy: float, loopback: float) -> Result:
    bench, started = Bench(name, shape), time.process_time()
    try:
        whole = measure(bench, shape.prompt_blocks, seconds)
        single = measure(bench, 1, seconds / 4)
        ours = time.process_time() - started
    finally:
        sinks = bench.close()
    nbytes = shape.prompt_blocks * shape.block_nbytes
    moved = len(whole) * nbytes + len(single) * shape.block_nbytes
    speed = nbytes / statistics.median(whole) / 1e9
    cpu = (ours + sinks) / (moved / 1e9)
    latency = statistics.median(single) * 1e6
    return Result(name, shape.name, speed, speed / memcpy, speed / loopback, latency, cpu)


def memcpy_limit(seconds: float) -> float:
    """GB/s of one thread copying 64 MiB."""
    source, target = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return len(source) / statistics.median(times) / 1e9


def socket_limit(seconds: float) -> float:
    """GB/s of one loopback TCP stream between two threads, in 1 MiB writes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    data, buffer, total = bytes(1 << 20), bytearray(1 << 20), 0

    def send() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sender.sendall(data)
        sender.close()

    thread = threading.Thread(target=send)
    started = time.perf_counter()
    thread.start()
    while count := receiver.recv_into(buffer):
        total += count
    thread.join()
    receiver.close()
    return total / (time.perf_counter() - started) / 1e9


def show(results: list[Result], memcpy: float, loopback: float) -> None:
    table = Table(title=f"limits: memcpy {memcpy:.1f} GB/s, loopback socket {loopback:.1f} GB/s")
    for column in ("connector", "shape", "GB/s", "of memcpy", "of socket", "1 block", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("connector", "shape") else "right")
    for each in results:
        ratios = f"{each.of_memcpy:.0%}", f"{each.of_socket:.0%}"
        figures = f"{each.one_block_us:.0f} µs", f"{each.cpu_s_per_gb:.2f}"
        table.add_row(each.connector, each.shape, f"{each.gb_per_s:.2f}", *ratios, *figures)
    Console().print(table)


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
