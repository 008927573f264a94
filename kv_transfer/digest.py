"""Digests: one hash per run of blocks, made at both ends, shows that the run landed as it was sent.

A digest covers the bytes of a run in canonical order (`blocks.py`) and the run, the transfer, the
epoch and the nodes' fingerprint. So it differs when blocks are flipped, swapped, stale, cut short
or another transfer's. Ranks make digests in `rank/digester.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.rpc.pb import cluster_pb2
from pdserve.kv_transfer.connector import BlockRun, RunDigest, SinkTransfer
from pdserve.kv_transfer.frame import bad_frame
from pdserve.kv_transfer.layout import Rect

_CONTEXT = struct.Struct("!16sI4III")  # transfer id, epoch, rectangle, first block, blocks


def hash_prefix(
    fingerprint: str, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
) -> bytes:
    """Returns the bytes that are hashed before a run."""
    context = _CONTEXT.pack(transfer_id, epoch, *rect.corners, run.first, run.count)
    return fingerprint.encode() + context


def digest_to_pb(digest: RunDigest) -> cluster_pb2.RunDigest:
    return cluster_pb2.RunDigest(
        sink=digest.sink,
        **asdict(digest.rect),
        first_block=digest.run.first,
        num_blocks=digest.run.count,
        digest=digest.digest,
    )


def digest_from_pb(message: cluster_pb2.RunDigest) -> RunDigest:
    run = BlockRun(message.first_block, message.num_blocks)
    return RunDigest(message.sink, Rect.of(message), run, message.digest)


def check_coverage(whole: Rect, transfer: SinkTransfer, digests: Sequence[RunDigest]) -> None:
    """Raises TransferError BAD_FRAME unless the digests cover every block of a rank that owns
    `whole` exactly once."""
    ends: dict[Rect, int] = {}
    for each in digests:
        if each.run.first != ends.setdefault(each.rect, transfer.first_block):
            raise bad_frame(f"the digests of {each.rect} skip to block {each.run.first}")
        ends[each.rect] = each.run.first + each.run.count
    end = transfer.first_block + len(transfer.block_ids)
    if any(reached != end for reached in ends.values()):
        raise bad_frame(f"digests end before block {end}")
    rects = list(ends)
    if len(rects) > whole.area:  # bounds the comparison of all pairs below
        raise bad_frame(f"digests of {len(rects)} pieces of {whole}")
    overlap = any(a.intersect(b).area for i, a in enumerate(rects) for b in rects[:i])
    within = all(whole.contains(rect) for rect in rects)
    wanted = whole.area if transfer.block_ids else 0
    if overlap or not within or sum(rect.area for rect in rects) != wanted:
        raise bad_frame(f"the digests do not tile {whole}")


def mismatch(wrong: Sequence[RunDigest]) -> TransferError:
    """Makes the error of runs that did not land as they were sent."""
    runs = ", ".join(
        f"blocks {each.run.first}…{each.run.first + each.run.count - 1} of {each.rect} "
        f"in share {each.sink}"
        for each in wrong[:3]
    )
    return TransferError(
        f"{len(wrong)} runs of KV differ from what was sent: {runs}",
        code="DIGEST_MISMATCH",
        blame=Blame.NETWORK,
        retryable=True,
    )
