"""What was sent is what has landed: one hash per run of blocks, made at both ends.

A digest covers the bytes of a run in canonical order (`blocks.py`) and says which run, of which
transfer and epoch, between nodes of which fingerprint: blocks that are flipped, swapped, stale,
cut short or meant for somebody else all differ. The hash is XXH3 (128 bits, not cryptographic:
it guards against accidents, and runs at the speed of memory).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.rpc.pb import cluster_pb2
from pdserve.kv_transfer.blocks import byte_runs, gather, memory_of, piece_nbytes
from pdserve.kv_transfer.connector import BlockRun, SinkTransfer
from pdserve.kv_transfer.connectors.base.frame import bad_frame
from pdserve.kv_transfer.layout import CacheView, Rect

STEP_NBYTES = 32 << 20  # hashed in a few milliseconds

_CONTEXT = struct.Struct("!16sI4III")  # transfer id, epoch, rectangle, first block, blocks


@dataclass(frozen=True, slots=True)
class RunDigest:
    """What the source says it sent to one sink rank."""

    sink_rank: int
    rect: Rect
    run: BlockRun
    digest: bytes  # 16 bytes

    def to_proto(self) -> cluster_pb2.RunDigest:
        return cluster_pb2.RunDigest(
            sink_rank=self.sink_rank,
            layer_start=self.rect.layer_start,
            layer_end=self.rect.layer_end,
            head_start=self.rect.head_start,
            head_end=self.rect.head_end,
            first_block=self.run.first,
            num_blocks=self.run.count,
            digest=self.digest,
        )

    @classmethod
    def from_proto(cls, message: cluster_pb2.RunDigest) -> RunDigest:
        rect = Rect.of(message)
        run = BlockRun(message.first_block, message.num_blocks)
        return cls(message.sink_rank, rect, run, message.digest)


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
        corners = (rect.layer_start, rect.layer_end, rect.head_start, rect.head_end)
        context = _CONTEXT.pack(transfer_id, epoch, *corners, run.first, run.count)
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
        _check_coverage(self._view.rect, transfer, digests)
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


def _check_coverage(whole: Rect, transfer: SinkTransfer, digests: Sequence[RunDigest]) -> None:
    ends: dict[Rect, int] = {}
    for each in digests:
        if each.run.first != ends.setdefault(each.rect, transfer.first_block):
            raise bad_frame(f"the digests of {each.rect} skip to block {each.run.first}")
        ends[each.rect] = each.run.first + each.run.count
    end = transfer.first_block + len(transfer.block_ids)
    if any(reached != end for reached in ends.values()):
        raise bad_frame(f"digests end before block {end}")
    rects = list(ends)
    if len(rects) > whole.area:  # or comparing all with all would take for ever
        raise bad_frame(f"digests of {len(rects)} pieces of {whole}")
    overlap = any(a.intersect(b).area for i, a in enumerate(rects) for b in rects[:i])
    within = all(rect.area and rect.intersect(whole) == rect for rect in rects)
    wanted = whole.area if transfer.block_ids else 0
    if overlap or not within or sum(rect.area for rect in rects) != wanted:
        raise bad_frame(f"the digests do not tile {whole}")


def mismatch(wrong: Sequence[RunDigest]) -> TransferError:
    """The error of runs that did not land as they were sent."""
    runs = ", ".join(
        f"blocks {each.run.first}…{each.run.first + each.run.count - 1} of {each.rect} "
        f"on rank {each.sink_rank}"
        for each in wrong[:3]
    )
    return TransferError(
        f"{len(wrong)} runs of KV differ from what was sent: {runs}",
        code="DIGEST_MISMATCH",
        blame=Blame.NETWORK,
        retryable=True,
    )
