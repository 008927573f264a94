"""Digests of runs: the same with and without compiled code, on one thread and on several."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from compiled import use_compiled_code
from pdserve.kv_transfer.connector import BlockRun, SinkTransfer
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import CacheView, Rect
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


def test_several_threads_find_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    view = random_view(Rect(0, 8, 0, 2), 64, 4096)
    ids = tuple(random.Random(0).sample(range(64), 64))
    monkeypatch.setattr(digester, "usable_cores", lambda: 3)
    made = Digester(view, "f")
    bands = made.bands(view.rect)
    assert len(bands) == 2 and sum(band.area for band in bands) == view.rect.area
    wanted = [Hashed(ID, 1, band, BlockRun(0, 64), ids) for band in bands]
    found = made.digests(wanted)
    assert found == [made.digest(*each) for each in wanted]
    sent = [RunDigest(0, *each) for each in zip(bands, [BlockRun(0, 64)] * 2, found, strict=True)]
    view.cache[7, 1, 5, 1, 0, 4095] ^= 1
    assert made.verify(SinkTransfer(ID, 1, 0, ids), sent) == (sent[1:], 0)
    made.close()
