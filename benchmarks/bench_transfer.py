"""Measures the throughput of KV blocks and the latency of one small block between two processes of
this host, per connector, and compares NIXL (over UCX) and Mooncake's transfer engine (over TCP).

Takes turns of rounds of a plain memory copy, a transfer without and one with digests by each
connector, and the same blocks moved by each peer; a plain loopback socket is measured now and then.
Other load only makes rounds slower, so a figure is the fastest decile of its rounds, and ratios are
of such figures of one run. Latencies are from the announcement of the run to the sink's `Landed`,
on an idle connection; a peer's are the duration of its call. Copying and hashing alone are measured
in CPU time (`--connectors "" --peers ""` measures nothing else). Prints tables; `--json FILE` also
writes the figures.

    python benchmarks/bench_transfer.py [--connectors shm,tcp] [--blocks N] [--json FILE]
    python benchmarks/bench_transfer.py --peers-python VENV/bin/python   # which has their packages

Peers move the same runs of the same blocks, and their first move is checked byte by byte.
`docs/performance.md` says what their figures leave out. If a peer is not installed, the reason is
shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compared.movers import NAMES, Mover, Peers
from benchmarks.compared.servers import Absent
from benchmarks.limits import socket_limit
from benchmarks.transfer_ends import (
    CHUNK_BLOCKS,
    Pair,
    Sample,
    Shape,
    block_ids,
    close_view,
    make_view,
)
from benchmarks.transfer_tables import Latency, Parts, Throughput, show, show_parts
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    copy_blocks,
    copy_hashed,
    memory_of,
)
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.rank.digester import Digester

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
MIN_ROUNDS = 3
IDLE_S = 0.001  # seconds idle before a small block


class Player:
    """Something measured in turns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spent = 0.0  # seconds spent in its turns
        self.plain: list[Sample] = []
        self.digested: list[Sample] = []  # samples with digests

    def turn(self, count: int, pause: float) -> None:
        started = time.perf_counter()
        self.play(count, pause)
        self.spent += time.perf_counter() - started

    def play(self, count: int, pause: float) -> None:
        """Moves a prompt of `count` blocks, after `pause` idle seconds."""
        raise NotImplementedError

    def over(self, seconds: float) -> bool:
        return self.spent >= seconds and len(self.plain) >= MIN_ROUNDS


class Connector(Player):
    def __init__(self, name: str, pair: Pair) -> None:
        super().__init__(name)
        self._pair = pair

    def play(self, count: int, pause: float) -> None:
        for digests in (False, True) if len(self.plain) % 2 else (True, False):
            samples = self.digested if digests else self.plain
            samples.append(self._pair.transfer(count, digests, pause))


class Peer(Player):
    def __init__(self, mover: Mover, shape: Shape, peers: Peers) -> None:
        super().__init__(mover.name)
        self._mover = mover
        self._shape = shape
        self._peers = peers

    def play(self, count: int, pause: float) -> None:
        ends = [block_ids(self._shape, count, seed) for seed in (1, 2)]
        time.sleep(pause)
        try:
            seconds = self._mover.move(*ends)
            self.plain.append(Sample(seconds, landed=seconds))
        except Absent as error:
            self._peers.absent[self.name] = str(error)
            self.plain.clear()

    def over(self, seconds: float) -> bool:
        return super().over(seconds) or self.name in self._peers.absent


@contextmanager
def playing(names: Sequence[str], peers: Peers, shape: Shape) -> Iterator[list[Player]]:
    """Yields connected players; the pages of a prompt have been touched."""
    with ExitStack() as stack:
        players: list[Player] = [
            Connector(name, stack.enter_context(closing(Pair(name, shape)))) for name in names
        ]
        geometry = (shape.planes, shape.num_blocks, shape.run_nbytes)
        for mover in stack.enter_context(peers.running(*geometry)):
            players.append(Peer(mover, shape, peers))
        for player in players:
            player.play(shape.prompt_blocks, 0.0)
            player.plain.clear()
            player.digested.clear()
        yield players


def take_turns(
    players: Sequence[Player], count: int, seconds: float, pause: float, between: Callable[[], None]
) -> list[Player]:
    """Runs rounds until each player has had its seconds; returns the players with results."""
    waiting = [each for each in players if not each.over(seconds)]
    while waiting:
        between()
        for player in waiting:
            player.turn(count, pause)
        waiting = [each for each in waiting[1:] + waiting[:1] if not each.over(seconds)]
    return [each for each in players if each.plain]


def fastest(values: Iterable[float]) -> float:
    """Returns the first decile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10]


def throughput(
    names: Sequence[str], peers: Peers, shape: Shape, seconds: float
) -> list[Throughput]:
    gigabytes = shape.prompt_blocks * shape.block_nbytes / 1e9
    copies: list[float] = []
    hashes: list[float] = []
    streams: list[float] = []
    view = make_view(shape)
    copy, make = copier(shape.prompt_blocks * shape.block_nbytes), hasher(view, shape)

    def between() -> None:
        if len(copies) % 8 == 0:
            streams.append(1 / socket_limit(0.05))
        copies.append(timed(copy))
        hashes.append(timed(make))

    with playing(names, peers, shape) as players:
        found = take_turns(players, shape.prompt_blocks, seconds, 0.0, between)
    close_view(view)
    if not found:
        return []
    memcpy, hashing = gigabytes / fastest(copies), gigabytes / fastest(hashes)
    figures = []
    for each in found:
        speed = gigabytes / fastest(sample.seconds for sample in each.plain)
        row = Throughput(each.name, shape.name, speed, speed / memcpy, speed * fastest(streams))
        if each.digested:
            digested = fastest(sample.seconds for sample in each.digested)
            cpu = fastest(sample.cpu for sample in each.plain)
            row = replace(
                row,
                cpu_s_per_gb=cpu / gigabytes,
                cpu_with_digests=fastest(sample.cpu for sample in each.digested) / cpu,
                with_digests=digested * speed / gigabytes,
                hash_gb_per_s=hashing,
                hash_of_memcpy=hashing / memcpy,
            )
        figures.append(row)
    return figures


def latency(names: Sequence[str], peers: Peers, shape: Shape, seconds: float) -> list[Latency]:
    copies: list[float] = []
    copy = copier(shape.block_nbytes)
    with playing(names, peers, shape) as players:
        found = take_turns(players, 1, seconds, IDLE_S, lambda: copies.append(timed(copy)))
    figures = []
    for each in found:
        landed = sorted(sample.landed * 1e6 for sample in each.plain)
        p50, p99 = statistics.median(landed), landed[len(landed) * 99 // 100]
        row = Latency(each.name, shape.name, landed[0], p50, p99, fastest(copies) * 1e6)
        if each.digested:
            committed, digested = (
                statistics.median(sample.seconds for sample in samples) * 1e6
                for samples in (each.plain, each.digested)
            )
            row = replace(row, committed_p50=committed, digests_p50=digested)
        figures.append(row)
    return figures


def parts(shape: Shape, seconds: float) -> Parts:
    source, target = make_view(shape), make_view(shape)
    count = shape.prompt_blocks
    theirs, ours = block_ids(shape, count, seed=1), block_ids(shape, count, seed=2)
    there, here = (
        CacheBytes.of(memory_of(view.cache), BlockLayout.of(view)) for view in (source, target)
    )
    digester = Digester(source, "bench")
    works = (
        copier(count * shape.block_nbytes),
        partial(copy_blocks, source.rect, here, ours, there, theirs),
        partial(digester.digest, bytes(16), 1, source.rect, BlockRun(0, count), theirs),
        partial(copy_hashed, bytes(68), source.rect, here, ours, there, theirs),
    )
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for work, spent in zip(works, times, strict=True):
            spent.append(timed(work, time.thread_time))
    speeds = (count * shape.block_nbytes / 1e9 / fastest(spent) for spent in times)
    for view in (source, target):
        close_view(view)
    return Parts(shape.name, *speeds)


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    work()
    return clock() - started


def copier(nbytes: int) -> Callable[[], None]:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return partial(np.copyto, target, source)


def hasher(view: CacheView, shape: Shape) -> Callable[[], None]:
    """Returns a function that computes a prompt's digests as a rank does."""
    digester, ids = Digester(view, "bench"), block_ids(shape, shape.prompt_blocks, seed=1)

    def make() -> None:
        for first in range(0, len(ids), CHUNK_BLOCKS):
            part = ids[first : first + CHUNK_BLOCKS]
            run = BlockRun(first, len(part))
            digester.digest(bytes(16), 1, view.rect, run, part)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--connectors", default="shm,tcp", help="names, separated by commas")
    add("--peers", default=",".join(NAMES), help="libraries to compare with ('': none)")
    add(
        "--peers-python",
        default=sys.executable,
        metavar="FILE",
        help="a Python in which they are installed",
    )
    add("--only", default="", metavar="TEXT", help="only shapes whose names contain this")
    add("--blocks", type=int, default=0, help="blocks of a prompt; 0: the shape's")
    add("--seconds", type=float, default=1.5, help="per connector or peer, and shape")
    add("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names, others = (
        [name for name in text.split(",") if name] for text in (args.connectors, args.peers)
    )
    peers = Peers(others, args.peers_python)
    large, small = ([each for each in all_ if args.only in each.name] for all_ in (SHAPES, SMALL))
    if count := args.blocks:
        large = [
            replace(shape, prompt_blocks=count, num_blocks=max(shape.num_blocks, 2 * count))
            for shape in large
        ]
    alone = [parts(shape, args.seconds) for shape in large]
    show_parts(alone)
    moved, blocks = [], []
    if names or others:
        moved = [row for shape in large for row in throughput(names, peers, shape, args.seconds)]
        blocks = [row for shape in small for row in latency(names, peers, shape, args.seconds)]
        show(moved, blocks, peers.versions, peers.absent)
    if args.json:
        figures = {"parts": alone, "throughput": moved, "latency": blocks}
        about = {"peers": peers.versions, "absent": peers.absent}
        with open(args.json, "w") as file:
            json.dump({**figures, **about}, file, indent=2, default=asdict)


if __name__ == "__main__":
    main()
