"""The hash of a run of blocks, made by the rank that sends it and by the rank that receives it
(`kv_transfer/digest.py`). It is XXH3 with 128 bits: not cryptographic, it guards against accidents
and runs at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash

from pdserve.common.core.host import usable_cores
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    gather,
    hash_blocks,
    memory_of,
    piece_nbytes,
    plane_runs,
)
from pdserve.kv_transfer.connector import BlockRun, RunDigest, SinkTransfer
from pdserve.kv_transfer.connectors.base.channel import OwnStream
from pdserve.kv_transfer.digest import check_coverage, hash_prefix
from pdserve.kv_transfer.layout import CacheView, Rect

MAX_THREADS = 4  # one reaches about half of the memory's bandwidth
STEP_NBYTES = 32 << 20  # hashed in a few milliseconds
THREADED_NBYTES = 1 << 20  # less is hashed sooner than another thread wakes up

LandedDigest = Callable[[bytes, int, Rect, BlockRun], bytes | None]
"""The type of a connector's method `landed_digest`."""


class Hashed(NamedTuple):
    """Names the blocks of a digest: logical blocks `run`, which are `block_ids` in this cache;
    `rect` is in the model's coordinates."""

    transfer_id: bytes
    epoch: int
    rect: Rect
    run: BlockRun
    block_ids: Sequence[int]


def _none_landed(transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun) -> None:
    """Returns None: the `LandedDigest` of a connector that hashes nothing."""


class Digester:
    """Hashes blocks of one rank's cache, several runs at once if there are
    cores. `close` ends its threads."""

    def __init__(self, view: CacheView, fingerprint: str) -> None:
        self._view = view
        self._fingerprint = fingerprint
        self._on_host = view.cache.device.type == "cpu"
        self._stream = OwnStream(view.cache.device)
        self._threads = min(MAX_THREADS, usable_cores()) if self._on_host else 1

    @cached_property
    def _bytes(self) -> CacheBytes:
        return CacheBytes.of(memory_of(self._view.cache), BlockLayout.of(self._view))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "kv-digest")

    def digests(self, wanted: Sequence[Hashed]) -> list[bytes]:
        nbytes = sum(self.nbytes(each.rect, each.run) for each in wanted)
        if self._threads == 1 or len(wanted) == 1 or nbytes < THREADED_NBYTES:
            return [self.digest(*each) for each in wanted]
        return list(self._pool.map(lambda each: self.digest(*each), wanted))

    def digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun, block_ids: Sequence[int]
    ) -> bytes:
        """Returns one digest; the arguments are the fields of `Hashed`."""
        prefix = hash_prefix(self._fingerprint, transfer_id, epoch, rect, run)
        if self._on_host:
            return hash_blocks(prefix, self._bytes, plane_runs(self._view, rect, block_ids))
        with self._stream.active():
            copy = gather(self._view, rect, block_ids).cpu()  # waits for the device
        hasher = xxhash.xxh3_128(prefix)
        hasher.update(copy.view(torch.uint8).reshape(-1).numpy().data)
        return hasher.digest()

    def verify(
        self,
        transfer: SinkTransfer,
        digests: Sequence[RunDigest],
        start: int = 0,
        landed: LandedDigest = _none_landed,
    ) -> tuple[list[RunDigest], int]:
        """Compares the transfer's blocks with the digests from number `start` on: `STEP_NBYTES`, or
        at least one run, so that each step renews the lease and other commands are served in
        between. Runs are read unless they were hashed as they `landed`. Returns the digests that
        differ, and how many are left.

        Raises:
            TransferError: BAD_FRAME, they do not cover every block of this rank exactly once.
        """
        check_coverage(self._view.rect, transfer, digests)
        found: dict[int, bytes] = {}
        unread: dict[int, Hashed] = {}
        nbytes, end = 0, start
        while end < len(digests) and nbytes < STEP_NBYTES:
            sent = digests[end]
            known = landed(transfer.transfer_id, transfer.epoch, sent.rect, sent.run)
            if known is None:
                unread[end] = _landed(transfer, sent)
                nbytes += self.nbytes(sent.rect, sent.run)
            else:
                found[end] = known
            end += 1
        found.update(zip(unread, self.digests(list(unread.values())), strict=True))
        wrong = [
            digests[number]
            for number in range(start, end)
            if digests[number].digest != found[number]
        ]
        return wrong, len(digests) - end

    def unread(
        self, transfer: SinkTransfer, digests: Sequence[RunDigest], landed: LandedDigest
    ) -> int:
        """Returns the bytes of the runs that were not hashed as they landed."""
        ids = transfer.transfer_id, transfer.epoch
        return sum(
            self.nbytes(each.rect, each.run)
            for each in digests
            if landed(*ids, each.rect, each.run) is None
        )

    def nbytes(self, rect: Rect, run: BlockRun) -> int:
        return piece_nbytes(self._view.cache, rect, run.count)

    def close(self) -> None:
        if "_pool" in self.__dict__:  # a cached property that was used
            self._pool.shutdown()


def _landed(transfer: SinkTransfer, sent: RunDigest) -> Hashed:
    """Names the blocks in which a run has landed."""
    start = sent.run.first - transfer.first_block
    ids = transfer.block_ids[start : start + sent.run.count]
    return Hashed(transfer.transfer_id, transfer.epoch, sent.rect, sent.run, ids)
