"""Digests of runs: the same with and without compiled code, on one thread and on several."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from compiled import use_compiled_code
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    RunsHash,
    byte_runs,
    copy_hashed,
    memory_of,
)
from pdserve.kv_transfer.connector import BlockRun, RunDigest, SinkTransfer
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.native import code
from pdserve.kv_transfer.rank import digester
from pdserve.kv_transfer.rank.digester import Digester, Hashed

ID = bytes(range(16))


def random_view(rect: Rect, num_blocks: int, head_numel: int) -> CacheView:
    shape = (rect.num_layers, 2, num_blocks, rect.num_heads, 1, head_numel)
    return CacheView(torch.randint(0, 256, shape, dtype=torch.uint8), rect)


def expected(view: CacheView, fingerprint: str, what: Hashed) -> bytes:
    layers, heads = what.rect.slices_in(view.rect)
    data = view.cache[layers, :, list(what.block_ids), heads].contiguous().numpy().tobytes()
    numbers = (what.epoch, *what.rect.corners, what.run.first, what.run.count)
    context = b"".join(number.to_bytes(4, "big") for number in numbers)
    return xxhash.xxh3_128(fingerprint.encode() + what.transfer_id + context + data).digest()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_digest_is_xxh3_of_the_bytes_in_order(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the lengths are: stripes and blocks of the hash begin and end anywhere."""
    use_compiled_code(compiled, monkeypatch)
    rng = random.Random(0)
    whole = Rect(1, 4, 2, 5)
    for _ in range(80):
        view = random_view(whole, 12, rng.choice((1, 3, 8, 63, 64, 65, 200, 341, 1024, 1111)))
        fingerprint = "f" * rng.randrange(70)
        made = Digester(view, fingerprint)
        ids = [rng.randrange(12) for _ in range(rng.randrange(5))]
        ids += list(range(rng.randrange(6)))  # adjacent
        for rect in (whole, Rect(2, 4, 3, 5)):
            what = Hashed(ID, rng.randrange(9), rect, BlockRun(rng.randrange(9), len(ids)), ids)
            assert made.digest(*what) == expected(view, fingerprint, what)


@pytest.mark.parametrize("compiled", [True, False])
def test_hashing_while_writing_gives_the_same_hash(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the loop that copies, past the caches or not, and in parts that end anywhere."""
    use_compiled_code(compiled, monkeypatch)
    rng = random.Random(0)
    whole = Rect(0, 3, 0, 3)
    for number in range(80):
        monkeypatch.setattr(code, "PAST_CACHES_NBYTES", number % 2 << 40)
        size = rng.choice((1, 3, 63, 64, 65, 200, 256, 341, 1024, 1111, 4096))
        views = [random_view(whole, 12, size) for _ in range(2)]
        ours, theirs = (CacheBytes.of(memory_of(v.cache), BlockLayout.of(v)) for v in views)
        count, start = rng.randrange(1, 9), rng.randrange(3)
        to, at = (
            rng.sample(range(12), count)
            if rng.random() < 0.5
            else list(range(start, start + count))
            for _ in range(2)
        )
        rect, prefix = rng.choice((whole, Rect(1, 3, 1, 3))), rng.randbytes(rng.randrange(90))
        wanted = views[0].cache.clone()
        layers, heads = rect.slices_in(whole)
        wanted[layers, :, to, heads] = views[1].cache[layers, :, at, heads]
        made = copy_hashed(prefix, rect, ours, to, theirs, at)
        assert torch.equal(views[0].cache, wanted)
        data = wanted[layers, :, to, heads].contiguous().numpy().tobytes()
        assert made == xxhash.xxh3_128(prefix + data).digest()
        runs = byte_runs(views[0], rect, to)
        parts = RunsHash(prefix, ours, len(data))
        for part in runs.parts(rng.choice((1 + len(data) // 50, 64, 100, 5000))):
            parts.update(part)
        assert parts.digest() == made


def test_several_threads_find_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    view = random_view(Rect(0, 8, 0, 2), 64, 4096)
    ids = tuple(random.Random(0).sample(range(64), 64))
    monkeypatch.setattr(digester, "usable_cores", lambda: 3)
    made = Digester(view, "f")
    parts = view.rect.split_layers(2)
    wanted = [Hashed(ID, 1, part, BlockRun(0, 64), ids) for part in parts]
    found = made.digests(wanted)
    assert found == [made.digest(*each) for each in wanted]
    sent = [RunDigest(0, *each) for each in zip(parts, [BlockRun(0, 64)] * 2, found, strict=True)]
    view.cache[7, 1, 5, 1, 0, 4095] ^= 1
    assert made.verify(SinkTransfer(ID, 1, 0, ids), sent) == (sent[1:], 0)
    made.close()
