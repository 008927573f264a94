"""The hash of a run of blocks, made by the rank that sent them and again by the one they landed in
(`kv_transfer/digest.py`). It is XXH3 (128 bits, not cryptographic: it guards against accidents, and
runs at the speed of memory).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import cached_property

import torch
import xxhash

from pdserve.kv_transfer.blocks import byte_runs, gather, memory_of, piece_nbytes
from pdserve.kv_transfer.connector import BlockRun, SinkTransfer
from pdserve.kv_transfer.digest import RunDigest, check_coverage
from pdserve.kv_transfer.layout import CacheView, Rect

STEP_NBYTES = 32 << 20  # hashed in a few milliseconds

_CONTEXT = struct.Struct("!16sI4III")  # transfer id, epoch, rectangle, first block, blocks


class Digester:
    """Hashes blocks of one rank's cache."""

    def __init__(self, view: CacheView, fingerprint: str) -> None:
        self._view = view
        self._fingerprint = fingerprint.encode()

    @cached_property
    def _memory(self) -> memoryview:
        return memory_of(self._view.cache)

    def digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun, block_ids: Sequence[int]
    ) -> bytes:
        """Of logical blocks `run`, which are `block_ids` here; `rect` in the model's terms."""
        context = _CONTEXT.pack(transfer_id, epoch, *rect.corners, run.first, run.count)
        hasher = xxhash.xxh3_128(self._fingerprint + context)
        if self._view.cache.device.type == "cpu":
            for part in byte_runs(self._view, rect, block_ids).slices(self._memory):
                hasher.update(part)
        else:
            copy = gather(self._view, rect, block_ids).cpu()
            hasher.update(copy.view(torch.uint8).reshape(-1).numpy().data)
        return hasher.digest()

    def verify(self, transfer: SinkTransfer, digests: Sequence[RunDigest]) -> Verification:
        """Begins to compare them with what lies in the transfer's blocks.

        Raises:
            TransferError: BAD_FRAME, they do not cover every block of this rank exactly once.
        """
        check_coverage(self._view.rect, transfer, digests)
        return Verification(self, transfer, digests)

    def nbytes(self, sent: RunDigest) -> int:
        return piece_nbytes(self._view.cache, sent.rect, sent.run.count)

    def of_landed(self, transfer: SinkTransfer, sent: RunDigest) -> bytes:
        start = sent.run.first - transfer.first_block
        ids = transfer.block_ids[start : start + sent.run.count]
        return self.digest(transfer.transfer_id, transfer.epoch, sent.rect, sent.run, ids)


class Verification:
    """Of one transfer, step by step: each is soon over, so that whoever waits for it sees it go
    on, and others need not wait for its end."""

    def __init__(
        self, digester: Digester, transfer: SinkTransfer, digests: Sequence[RunDigest]
    ) -> None:
        self.transfer = transfer
        self._digester = digester
        self._left = deque(digests)

    @property
    def left(self) -> int:
        """Runs not compared yet."""
        return len(self._left)

    def step(self) -> list[RunDigest]:
        """Compares the next runs, `STEP_NBYTES` or one at least; returns those that differ."""
        wrong, nbytes = [], 0
        while self._left and nbytes < STEP_NBYTES:
            sent = self._left.popleft()
            nbytes += self._digester.nbytes(sent)
            if self._digester.of_landed(self.transfer, sent) != sent.digest:
                wrong.append(sent)
        return wrong
