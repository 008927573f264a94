"""The connector interface: what a plugin author implements to move KV blocks.

A connector object lives in each rank of each node, beside the KV cache. On the decode side
it is the *sink*: it announces an endpoint and takes blocks. On the prefill side it is the
*source*: it connects to the sinks' endpoints and delivers runs of blocks as they become
ready. One object may be both.

    source rank                                   sink rank
    -----------                                   ---------
                                                  endpoint() -> bytes       once, at start
                                                  accept(SinkTransfer)      blocks are held
    submit(SourceTransfer)   connect if needed
    ready(id, run) ...       deliver run ═══════▶ into the blocks
                                                  emits Landed(id, bytes) when all pieces are in
    emits Sent(id)           source no longer reads its blocks for this transfer
    release(id)              forget it            release(id)
                                                  quiesce(id): after it returns, nothing
                                                  writes into the transfer's blocks

After `quiesce` the same transfer may be accepted and submitted again, with a higher epoch: for a
retry, or for another source that takes over. Data of an older epoch is dropped.

The core owns leases and deadlines, epochs, digests, counting ranks, planning, retries and the order
in which blocks are freed, so a connector cannot get them wrong. A connector counts and drops events
that are late, duplicate or unknown.

A simple transport need not implement this class: see `kv_transfer/pipe.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pdserve.common.core.errors import TransferError
from pdserve.kv_transfer.layout import CacheView, Piece, Rect

API_VERSION = 2


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Declares what a connector can do; nothing is probed."""

    push: bool = False  # the source writes or sends
    pull: bool = False  # the sink reads the source's memory
    one_sided: bool = False  # memory is read or written without the owner's code running
    same_host: bool = False  # both ranks must share a host
    devices: frozenset[str] = field(default_factory=lambda: frozenset({"cpu"}))
    authenticates: bool = False  # peers prove `RankContext.keys`, or the kernel names their user
    # Only the sink's own code writes into its blocks, and hashes runs as it does
    # (`KVConnector.landed_digest`).
    sink_writes: bool = False
    source_hashes: bool = False  # the source hashes runs as it sends them (`ready_hashed`)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive logical blocks of one transfer: `first … first+count-1`, counted from the
    start of the prompt."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RunDigest:
    """Carries the source's digest of a run that it sent to one share of the sink."""

    sink: int  # `Piece.sink`
    rect: Rect  # of the piece
    run: BlockRun  # announced, or a part of it
    digest: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class SinkTransfer:
    """Tells a sink rank which blocks to fill. `block_ids[i]` is the physical block of logical block
    `first_block + i`. With `digests`, the commit will have digests to compare."""

    transfer_id: bytes
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    digests: bool = False


@dataclass(frozen=True, slots=True)
class SourceTransfer:
    """Tells a source rank which pieces go to which endpoint."""

    transfer_id: bytes
    epoch: int
    pieces: tuple[tuple[Piece, bytes], ...]  # (piece, endpoint of its sink rank)


# ---- events, from connector to core ----


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports that `nbytes` more have moved, each byte counted once. It renews the lease, as do
    Landed and Sent, which may report the last bytes alone."""

    transfer_id: bytes
    epoch: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Sink: every piece of this rank is in its blocks and nothing more is written into them, so the
    blocks may be used. Only the core fills in `connectors`: the names of the connectors that moved
    bytes."""

    transfer_id: bytes
    epoch: int
    nbytes: int
    connectors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """Source: every run announced so far, the last one included, was delivered. `digests`: of the
    runs that were announced by `ready_hashed`."""

    transfer_id: bytes
    epoch: int
    nbytes: int
    seconds: float  # from the first run announced to the last one delivered
    digests: tuple[RunDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Ends a transfer that cannot continue; `code` as in TransferError, `blame` as in Blame."""

    transfer_id: bytes
    epoch: int
    code: str
    blame: str
    retryable: bool
    message: str

    @classmethod
    def of(cls, transfer_id: bytes, epoch: int, error: TransferError) -> Failed:
        fault = (error.code, error.blame.value, error.retryable, error.message)
        return cls(transfer_id, epoch, *fault)


Event = Progress | Landed | Sent | Failed


@dataclass(frozen=True, slots=True)
class RankContext:
    """Gives a connector its cache, the address to bind to and the way to report."""

    view: CacheView  # the cache tensor and the rectangle it covers
    bind_host: str
    fingerprint: str  # a peer with another fingerprint is refused when it connects
    emit: Callable[[Event], None]  # thread-safe
    # A peer must prove that it knows one of these keys before anything else is exchanged. Sign with
    # the first, accept all. Empty: the cluster has no key. Never log them.
    keys: tuple[bytes, ...] = field(default=(), repr=False)


class KVConnector(ABC):
    """Moves KV at one rank's end of the data plane. Only `quiesce` and `close` may block.

    Any method may be called while a forward pass runs on another thread, and must be safe
    against the connector's own threads.
    """

    api_version: ClassVar[int] = API_VERSION
    capabilities: ClassVar[Capabilities]

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        """`config` has the connector's options from `--kv-connector-config`.

        Raises:
            ConfigError: an unknown key.
        """
        self.context = context

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts late, duplicate and drained events by name, within this rank. Default: none."""
        return {}

    @abstractmethod
    def endpoint(self) -> bytes:
        """Returns the address at which sources reach this rank: opaque bytes, carried in the
        ticket."""

    @abstractmethod
    def accept(self, transfer: SinkTransfer) -> None:
        """Sink: starts to take blocks for this transfer id and epoch, and for no older epoch."""

    @abstractmethod
    def submit(self, transfer: SourceTransfer) -> None:
        """Source: begins a transfer. Connecting happens in the background; a failure to connect is
        a `Failed` event."""

    @abstractmethod
    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        """Source: announces blocks that hold final KV and may be delivered. `block_ids` are this
        node's physical blocks for `run`; `last` marks the transfer's final run, which may be
        empty. The blocks do not change until `release`."""

    @property
    def hashes_as_it_sends(self) -> bool:
        """Returns whether this source makes the digests of runs that `ready_hashed` announces."""
        return self.capabilities.source_hashes

    def ready_hashed(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        """Source, with `source_hashes`: does as `ready`, and hashes the run, or each part of it,
        when it sends it (`digest.hash_prefix` comes before the bytes). `Sent` brings the digests.
        The core announces small runs by `ready` and hashes them itself."""
        raise NotImplementedError

    @abstractmethod
    def quiesce(self, transfer_id: bytes) -> None:
        """Returns when nothing writes into the transfer's blocks (sink) or reads them (source), and
        nothing will. It returns at once for an unknown transfer. A one-sided read may end after
        the source's `quiesce` if it then does not count."""

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        """Sink, with `sink_writes`: returns the hash of the bytes written into the blocks of a run,
        made while writing (`digest.hash_prefix` comes before the bytes). None, the default: there
        is no hash, and the core reads the blocks again."""
        return None

    def release(self, transfer_id: bytes) -> None:
        """Forgets a transfer that the core is done with. Default: `quiesce`."""
        self.quiesce(transfer_id)

    @abstractmethod
    def close(self, deadline: float) -> None:
        """Stops all threads and closes all sockets within `deadline` seconds."""
