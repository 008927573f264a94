"""A rank's connector for one KV group, driven by the node's commands, and its digests."""

from __future__ import annotations

import logging
import threading

from pdserve.common.core.errors import TransferError
from pdserve.common.core.host import leave
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.commands import (
    Accept,
    Command,
    Quiesce,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
)
from pdserve.kv_transfer.connector import (
    BlockRun,
    KVConnector,
    RunDigest,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.channel import FRAME_NBYTES, parts
from pdserve.kv_transfer.rank.digester import Digester, Hashed

logger = logging.getLogger(__name__)

# Runs of up to this size are hashed on the caller's thread: that takes less time than waking
# another thread, which has to wait for the interpreter.
SHORT_NBYTES = 512 << 10
SHORT_RUNS = 64


class GroupConnector:
    """Serves a connector of one cache, and makes digests, which connectors need not know."""

    def __init__(self, connector: KVConnector, source: bool) -> None:
        context = connector.context
        self._connector = connector
        self._digester = Digester(context.view, context.fingerprint)
        self._sinks: dict[bytes, SinkTransfer] = {}
        self._sources: dict[bytes, SourceTransfer] = {}
        self._busy = threading.Lock()  # one call at a time
        self.endpoint = b"" if source else connector.endpoint()

    def handle(self, command: Command) -> Reply:
        """Raises the TransferError of the connector."""
        with self._busy:
            return self._serve(command)

    def handle_at_once(self, command: Command) -> Reply | None:
        """Handles a command that is soon served, while no other is; else returns None."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            return self._serve(command) if self._is_short(command) else None
        finally:
            self._busy.release()

    def _is_short(self, command: Command) -> bool:
        """Returns whether a command is soon served: a connector blocks only in `quiesce`, and much
        hashing takes time."""
        match command:
            case Accept() | Submit():
                return True
            case Ready():
                soon = self._is_hashed_soon(self._to_hash(command))
                return soon or self._is_hashed_as_sent(command)
            case Verify(transfer_id, digests=digests):
                sink = self._sinks.get(transfer_id)
                if sink is None or len(digests) > SHORT_RUNS:
                    return sink is None
                landed = self._connector.landed_digest
                return self._is_hashed_soon(self._digester.unread(sink, digests, landed))
            case _:
                return False

    def _to_hash(self, ready: Ready) -> int:
        """Returns the bytes of a run whose digests are wanted."""
        source = self._sources.get(ready.transfer_id)
        if source is None or not ready.digest:
            return 0
        cache = self._connector.context.view.cache
        return sum(piece_nbytes(cache, piece.rect, ready.run.count) for piece, _ in source.pieces)

    def _is_hashed_as_sent(self, ready: Ready) -> bool:
        """Returns whether the connector hashes a run: a small one is hashed here at once, so that
        the commit need not wait until the connector has sent it."""
        return self._connector.hashes_as_it_sends and self._to_hash(ready) > SHORT_NBYTES

    def _is_hashed_soon(self, nbytes: int) -> bool:
        on_host = self._connector.context.view.cache.device.type == "cpu"
        return nbytes <= SHORT_NBYTES and (on_host or not nbytes)

    def _serve(self, command: Command) -> Reply:
        match command:
            case Accept(transfer):
                self._connector.accept(transfer)
                self._sinks[transfer.transfer_id] = transfer
            case Submit(transfer):
                self._connector.submit(transfer)
                self._sources[transfer.transfer_id] = transfer
            case Ready(transfer_id, run, block_ids, last):
                if self._is_hashed_as_sent(command):
                    self._connector.ready_hashed(transfer_id, run, block_ids, last)
                    return Reply(hashed_as_sent=True)
                self._connector.ready(transfer_id, run, block_ids, last)
                return Reply(digests=self._digest(command))
            case Verify():
                return self._verify(command)
            case Quiesce(transfer_id):
                self._forget(transfer_id)
                self._quiesce(transfer_id)
            case Release(transfer_id):
                self._forget(transfer_id)
                self._connector.release(transfer_id)
        return Reply()

    def _quiesce(self, transfer_id: bytes) -> None:
        """Quiesces the connector or ends this process: the blocks will belong to other sequences,
        so a connector that may still touch them must not live on."""
        try:
            self._connector.quiesce(transfer_id)
        except Exception:
            logger.critical(
                "the KV connector failed to quiesce a transfer, so this process ends",
                exc_info=True,
            )
            leave(1)

    def _digest(self, ready: Ready) -> tuple[RunDigest, ...]:
        """Hashes a run while the connector delivers it, in parts as large as a frame: a sink that
        hashes frames as they land has the same parts."""
        transfer = self._sources.get(ready.transfer_id)
        if transfer is None or not ready.digest or not ready.run.count:
            return ()
        cache, ids = self._connector.context.view.cache, (transfer.transfer_id, transfer.epoch)
        sinks, wanted = [], []
        for piece, _ in transfer.pieces:
            for cut in parts(cache, piece.rect, ready.run.count, FRAME_NBYTES):
                run = BlockRun(ready.run.first + cut.start, cut.stop - cut.start)
                sinks.append(piece.sink)
                wanted.append(Hashed(*ids, piece.rect, run, ready.block_ids[cut]))
        made = self._digester.digests(wanted)
        return tuple(
            RunDigest(sink, each.rect, each.run, digest)
            for sink, each, digest in zip(sinks, wanted, made, strict=True)
        )

    def _verify(self, command: Verify) -> Reply:
        transfer = self._sinks.get(command.transfer_id)
        if transfer is None or transfer.epoch != command.epoch:
            raise _stopped()
        wrong, left = self._digester.verify(
            transfer, command.digests, command.start, self._connector.landed_digest
        )
        return Reply(digests=tuple(wrong), left=left)

    def _forget(self, transfer_id: bytes) -> None:
        self._sinks.pop(transfer_id, None)
        self._sources.pop(transfer_id, None)

    def close(self, deadline: float) -> None:
        self._connector.close(deadline)
        self._digester.close()


def _stopped() -> TransferError:
    return TransferError("the transfer was stopped", code="UNKNOWN_TRANSFER")
