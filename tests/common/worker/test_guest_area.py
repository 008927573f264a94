"""A cache with room for guests: one tensor over several ranks' memory."""

from __future__ import annotations

import mmap
import multiprocessing
import signal

import pytest
import torch

from pdserve.common.engine.messages import CacheShape
from pdserve.common.worker.guest_area import GUESTS_PER_BLOCK, whole_pages
from pdserve.common.worker.kv_cache import KVCache

CPU = torch.device("cpu")
SHAPE = CacheShape(0, 3, 0, 2, 13, 4, 8, "float32")  # 13 blocks of 256 bytes a plane


def make(num_blocks: int = 13) -> KVCache:
    shape = CacheShape(0, 3, 0, 2, num_blocks, 4, 8, "float32")
    return KVCache.allocate(shape, CPU, guests=True)


def test_planes_are_whole_pages() -> None:
    assert whole_pages(13, 256) == 16
    assert whole_pages(16, 256) == 16
    assert whole_pages(5, 3) == mmap.PAGESIZE
    cache = make()
    assert cache.tensor.shape[2] == 16 and cache.shape.num_blocks == 13
    assert cache.guest_ids == (16, 16 * (1 + GUESTS_PER_BLOCK))
    assert KVCache.allocate(SHAPE, CPU).computed.shape[2] == 13  # without room: as it was


def test_own_blocks_are_the_first_of_the_whole() -> None:
    cache = make()
    cache.tensor.copy_(torch.rand_like(cache.tensor))
    assert cache.computed.is_contiguous()
    assert torch.equal(cache.computed[:, :, :16], cache.tensor)
    cache.computed[:, :, 5] = 3.0
    assert (cache.tensor[:, :, 5] == 3.0).all()
    assert not cache.computed[:, :, 16:].any()


def test_lenders_come_and_go() -> None:
    cache, one, other = make(), make(), make(40)
    for each in (one, other):
        each.tensor.copy_(torch.rand_like(each.tensor))
    area = cache.guests
    assert area is not None and one.fd is not None and other.fd is not None
    area.map(one.fd, 0, 16, 16)
    area.map(other.fd, 0, 48, 32)
    assert torch.equal(cache.computed[:, :, 16:32], one.tensor)
    assert torch.equal(cache.computed[:, :, 32:80], other.tensor)
    one.tensor[1, 1, 3] = 7.0  # it is the same memory
    assert (cache.computed[1, 1, 19] == 7.0).all()
    one.close()
    area.map(other.fd, 0, 48, 16)  # over both
    assert torch.equal(cache.computed[:, :, 16:64], other.tensor)
    area.clear(16, 48)
    assert not cache.computed[:, :, 16:64].any()
    assert not cache.tensor.any()


@pytest.mark.parametrize("place", [(0, 16), (15, 16), (16, 15), (16, 16 * 16), (16, 0), (17, 16)])
def test_places_that_cannot_be(place: tuple[int, int]) -> None:
    cache = make()
    assert cache.guests is not None and cache.fd is not None
    with pytest.raises(ValueError, match="guests"):
        cache.guests.map(cache.fd, 0, place[1], place[0])


def _write_to_a_guest() -> None:
    cache, lender = make(), make()
    assert cache.guests is not None and lender.fd is not None
    cache.guests.map(lender.fd, 0, 16, 16)
    cache.computed[0, 0, 16] = 1.0


def test_nobody_writes_to_a_lenders_blocks() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_to_a_guest)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGSEGV
