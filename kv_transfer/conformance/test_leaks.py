"""After `close` nothing is left: no thread, no descriptor, no file, no shared memory."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.kv_transfer.conformance.caches import FREE, MemoryCache
from pdserve.kv_transfer.conformance.ends import CLOSE_S, LocalEnd, Target
from pdserve.kv_transfer.conformance.kit import GEOMETRY, Kit
from pdserve.kv_transfer.conformance.nodes import KitNode, Pair, eventually, scattered, settle
from pdserve.kv_transfer.connector import BlockRun

UNDER_WAY = b"under-way-at-end"


@dataclass(frozen=True)
class Holdings:
    """Counts resources of this process that must be given back."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls, folders: list[Path]) -> Holdings:
        files = (str(path) for folder in folders for path in folder.rglob("*"))
        descriptors = frozenset(os.listdir("/proc/self/fd"))
        return cls(frozenset(threading.enumerate()), descriptors, frozenset(files))

    def more_than(self, before: Holdings) -> list[str]:
        threads = [f"thread {each.name}" for each in self.threads - before.threads]
        extra = len(self.descriptors) - len(before.descriptors)
        descriptors = [f"{extra} file descriptors"] if extra > 0 else []
        return threads + descriptors + [f"file {path}" for path in self.files - before.files]


@pytest.fixture
def folders(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Returns the folders where files could remain: the test's own and those of the options."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return [tmp_path, *named_folders(target.config)]


def named_folders(config: Mapping[str, Any]) -> list[Path]:
    paths = [Path(value) for value in config.values() if isinstance(value, str)]
    return [path for path in paths if path.is_dir()]


def transfers(pair: Pair[LocalEnd, LocalEnd], count: int) -> None:
    """Runs transfers that succeed, each beside one that is abandoned."""
    for number in range(count):
        done, given_up = bytes([number]) * 16, bytes([number, 255]) * 8
        ids = scattered(6, 256, number)
        pair.accept(given_up, ids)
        pair.submit(given_up)
        pair.ready(given_up, BlockRun(0, 3), ids[:3])
        pair.send(done, ids, ids, (4, 2))
        for end in (pair.source.end, pair.sink.end):
            end.release(done)
            end.quiesce(given_up)


def check_back(before: Holdings, now: Callable[[], Holdings]) -> None:
    assert eventually(lambda: not now().more_than(before), within=2.0), (
        f"left over: {', '.join(now().more_than(before))}"
    )


def life(kit: Kit, source: MemoryCache, sink: MemoryCache) -> None:
    """Two ranks from start to close, one transfer still under way then."""
    nodes = [KitNode(cache.geometry, [LocalEnd(kit.target, cache)]) for cache in (source, sink)]
    pair = Pair(nodes[0], nodes[1])
    transfers(pair, 5)
    pair.accept(UNDER_WAY, (1, 2))
    pair.submit(UNDER_WAY)
    pair.announce(UNDER_WAY, (1,), last=False)
    for node in nodes:
        node.end.close()


def no_more_segments(before: set[str]) -> bool:
    return set(os.listdir("/dev/shm")) <= before


@pytest.fixture
def caches(kit: Kit) -> Iterator[tuple[MemoryCache, MemoryCache]]:
    """Runs `life` once before the measurement: modules it loads and caches it fills may stay."""
    made = (MemoryCache(GEOMETRY, GEOMETRY.rect), MemoryCache(GEOMETRY, GEOMETRY.rect))
    life(kit, *made)
    yield made
    for cache in made:
        cache.close()


def test_close_gives_everything_back(
    kit: Kit, folders: list[Path], caches: tuple[MemoryCache, MemoryCache]
) -> None:
    """Ranks that have transferred, succeeded, given up and been closed leave neither threads nor
    descriptors nor files."""
    before = Holdings.now(folders)
    life(kit, *caches)
    check_back(before, lambda: Holdings.now(folders))


def test_close_leaves_no_shared_memory(kit: Kit, caches: tuple[MemoryCache, MemoryCache]) -> None:
    """Nothing stays in /dev/shm. (Other programs use it as well: a leak is what comes back each
    time.)"""
    for _ in range(3):
        before = set(os.listdir("/dev/shm"))
        life(kit, *caches)
        if eventually(partial(no_more_segments, before), within=1.0):
            return
    pytest.fail(f"left over in /dev/shm: {set(os.listdir('/dev/shm')) - before}")


def test_transfers_give_everything_back(kit: Kit, folders: list[Path]) -> None:
    """A pair of ranks that works on holds no more after thirty transfers than after two."""
    pair = kit.pair()
    transfers(pair, 2)
    before = Holdings.now(folders)
    transfers(pair, 30)
    check_back(before, lambda: Holdings.now(folders))


def test_close_ends_all_writes(kit: Kit) -> None:
    """`close` half way through a transfer returns in time, and nothing is written after it."""
    pair = kit.pair()
    ids = scattered(200, 256)
    pair.accept(UNDER_WAY, ids)
    pair.submit(UNDER_WAY)
    pair.announce(UNDER_WAY, ids[:100], (20,) * 5, last=False)
    started = time.monotonic()
    pair.sink.end.close(CLOSE_S)
    assert time.monotonic() - started < CLOSE_S, f"`close({CLOSE_S:g})` took longer"
    pair.sink.end.cache.tensor.fill_(FREE)
    pair.announce(UNDER_WAY, ids[100:], (20,) * 5, first=100)
    settle()
    assert pair.others_untouched(()), "a block was written after `close` had returned"
