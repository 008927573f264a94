"""The frames between two ranks: fixed-size headers, each followed by `nbytes` of payload.

source                                  sink
CHALLENGE  a random number      ◀─▶     and mine                           (with a cluster key)
PROOF  payload: its MAC         ◀─▶     and mine                           (with a cluster key)
HELLO  payload: my fingerprint  ──▶
                                ◀──     WELCOME, or REFUSED (payload: code: why)
MEET  payload: my address       ◀─▶     and mine: so a group of the two forms       (group)
BEGIN  a piece of a transfer    ──▶     this connection answers for it (also a keepalive)
DATA   payload: the KV bytes    ──▶     into the blocks                              (push)
OFFER  payload: my block ids    ──▶     reads them from my memory                    (pull)
                                ◀──     TAKEN
CONFIRM  count 1: I held them   ──▶     after either: it counts; 0: it does not

Transfers share a connection, which outlives them. When a transfer is cancelled within a DATA frame,
the source fills the frame up with other bytes and confirms 0, and the sink receives the rest of it
into scratch memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.layout import WIRE_VERSION, Rect

MAGIC = b"pdKV"
# magic, version, kind, transfer id, epoch, rectangle, first block, blocks, payload bytes; then the
# CRC-32 of these: a flipped bit would name another transfer, and this one would wait for its lease.
_HEADER = struct.Struct("!4sHH16sI4IIIQ")
_CRC = struct.Struct("!I")
HEADER_NBYTES = _HEADER.size + _CRC.size
MAX_GREETING = 4096  # bytes of a frame from a peer that is not authenticated yet


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    BEGIN = 4
    DATA = 5
    OFFER = 6
    TAKEN = 7
    CONFIRM = 8
    MEET = 9
    CHALLENGE = 10
    PROOF = 11


NOWHERE = Rect(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """Describes one header. Blocks `first … first+count-1` are counted from the start of the
    prompt."""

    kind: FrameKind
    transfer_id: bytes = bytes(16)
    epoch: int = 0
    rect: Rect = NOWHERE
    first: int = 0
    count: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        header = _HEADER.pack(
            MAGIC,
            WIRE_VERSION,
            self.kind,
            self.transfer_id,
            self.epoch,
            *self.rect.corners,
            self.first,
            self.count,
            self.nbytes,
        )
        return header + _CRC.pack(crc32(header))

    @classmethod
    def decode(cls, header: bytes) -> Frame:
        """Raises TransferError BAD_FRAME unless it is a header of this wire version."""
        if len(header) != HEADER_NBYTES:
            raise bad_frame(f"a header of {len(header)} bytes")
        magic, version, kind, transfer_id, epoch, *rest = _HEADER.unpack_from(header)
        if magic != MAGIC or version != WIRE_VERSION:
            raise bad_frame(f"magic {magic!r}, wire version {version} ≠ {WIRE_VERSION}")
        if _CRC.unpack_from(header, _HEADER.size) != (crc32(header[: _HEADER.size]),):
            raise bad_frame("the checksum of its header is wrong")
        try:
            known = FrameKind(kind)
        except ValueError as error:
            raise bad_frame(f"unknown kind {kind}") from error
        return cls(known, transfer_id, epoch, Rect(*rest[:4]), *rest[4:])


def bad_frame(message: str, blame: Blame = Blame.PREFILL) -> TransferError:
    return TransferError(f"bad frame: {message}", code="BAD_FRAME", blame=blame, retryable=False)
