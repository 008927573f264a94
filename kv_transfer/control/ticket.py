"""The ticket: a decode node's permission to write into blocks it holds for one job."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.core.host import is_address
from pdserve.common.rpc.pb import cluster_pb2
from pdserve.kv_transfer.frame import MAX_GREETING, bad_frame
from pdserve.kv_transfer.layout import Rect, Share

MIN_LEASE_S, MAX_LEASE_S = 0.1, 86_400.0  # as `--kv-lease`
MAX_RANKS = 4096


def new_transfer_id() -> bytes:
    """Returns 16 random bytes; a peer that knows them may write into the transfer's blocks."""
    return secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Names one sink rank's share of a KV group and the endpoint at which it takes data."""

    rank: int
    rect: Rect
    endpoint: bytes  # only connectors read it
    group: int = 0

    @property
    def share(self) -> Share:
        return Share(self.rank, self.rect, self.group)

    def to_pb(self) -> cluster_pb2.RankEndpoint:
        rect = asdict(self.rect)
        return cluster_pb2.RankEndpoint(
            rank=self.rank, endpoint=self.endpoint, group=self.group, **rect
        )

    @classmethod
    def from_pb(cls, message: cluster_pb2.RankEndpoint) -> RankEndpoint:
        rect = Rect.of(message)
        if not rect.area or rect.layer_end < rect.layer_start:
            raise TransferError(
                f"rank {message.rank} announces the empty {rect}",
                code="LAYOUT_MISMATCH",
                retryable=False,
                blame=Blame.DECODE,
            )
        return cls(message.rank, rect, message.endpoint, message.group)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Asks for blocks `first_blocks[g] … num_blocks-1` of each KV group g; fields as in
    `cluster.proto`. Tickets of one transfer differ only in the epoch."""

    transfer_id: bytes
    epoch: int
    lease_s: float
    address: str
    fingerprint: str
    block_size: int
    num_tokens: int
    first_blocks: tuple[int, ...]
    endpoints: tuple[RankEndpoint, ...]
    digests: bool

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks of all tokens."""
        return -(-self.num_tokens // self.block_size)

    def to_pb(self) -> cluster_pb2.Ticket:
        return cluster_pb2.Ticket(
            transfer_id=self.transfer_id,
            epoch=self.epoch,
            lease_s=self.lease_s,
            address=self.address,
            fingerprint=self.fingerprint,
            block_size=self.block_size,
            num_tokens=self.num_tokens,
            first_blocks=self.first_blocks,
            endpoints=[endpoint.to_pb() for endpoint in self.endpoints],
            digests=self.digests,
        )

    @classmethod
    def from_pb(cls, message: cluster_pb2.Ticket) -> Ticket:
        """Raises TransferError (BAD_FRAME, LAYOUT_MISMATCH) on an invalid ticket."""
        ticket = cls(
            transfer_id=message.transfer_id,
            epoch=message.epoch,
            lease_s=message.lease_s,
            address=message.address,
            fingerprint=message.fingerprint,
            block_size=message.block_size,
            num_tokens=message.num_tokens,
            first_blocks=tuple(message.first_blocks),
            endpoints=tuple(RankEndpoint.from_pb(each) for each in message.endpoints),
            digests=message.digests,
        )
        ticket._check()
        return ticket

    def check_successor(self, later: Ticket) -> None:
        """Raises TransferError (BAD_FRAME) unless `later` has a later epoch of this transfer."""
        if later.epoch <= self.epoch or replace(later, epoch=self.epoch) != self:
            raise bad_frame("the ticket of the next epoch is another transfer's", Blame.DECODE)

    def _check(self) -> None:
        faults = [
            (
                len(self.transfer_id) != 16,
                f"a transfer id of {len(self.transfer_id)} bytes, not 16",
            ),
            (not MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S, f"a lease of {self.lease_s} s"),
            (not is_address(self.address), "no address of its decode node"),
            (self.block_size < 1, f"a block size of {self.block_size}"),
            (self.num_tokens < 1, "no tokens"),
            (not 0 < len(self.endpoints) <= MAX_RANKS, f"{len(self.endpoints)} endpoints"),
            (
                any(len(each.endpoint) > MAX_GREETING for each in self.endpoints),
                f"an endpoint of more than {MAX_GREETING} bytes",
            ),
        ]
        for wrong, fault in faults:
            if wrong:
                raise bad_frame(f"the ticket has {fault}", Blame.DECODE)
        if any(first > self.num_blocks for first in self.first_blocks):
            raise bad_frame(
                f"the ticket's first blocks {self.first_blocks} are past its {self.num_blocks} "
                "blocks",
                Blame.DECODE,
            )
        shares = [(each.rank, each.group) for each in self.endpoints]
        ranks = sorted({rank for rank, _ in shares})
        if ranks != list(range(len(ranks))) or len(set(shares)) < len(shares):
            raise bad_frame(f"the ticket's ranks and groups are {shares}", Blame.DECODE)
        if any(group >= len(self.first_blocks) for _, group in shares):
            raise bad_frame(
                f"the ticket has first blocks of {len(self.first_blocks)} groups, and shares "
                f"{shares}",
                Blame.DECODE,
            )
