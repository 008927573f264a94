"""The rank half of the KV transfer: a rank's connectors, driven by the executor's messages.

It implements the `Extension` of `common/distributed/executor.py`: it lives in each rank, beside the
cache, and is served while a step computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import torch

from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.common.core.host import leave
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.commands import (
    Accept,
    Command,
    Quiesce,
    RankError,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
    decode_command,
    encode_event,
)
from pdserve.kv_transfer.connector import KVConnector, RankContext, SinkTransfer, SourceTransfer
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import CacheView, Part, Rect
from pdserve.kv_transfer.native.code import block_code
from pdserve.kv_transfer.rank.digester import Digester, Hashed
from pdserve.kv_transfer.selection import RankConfig, load_connector

logger = logging.getLogger(__name__)

# Up to so much is hashed on the caller's thread: that takes less time than waking another thread,
# which has to wait for the interpreter.
SHORT_NBYTES = 512 << 10
SHORT_RUNS = 64


_configs = msgspec.msgpack.Decoder(RankConfig)


class WorkerConnector:
    """Serves one rank\'s connector, and makes digests, which connectors need not know."""

    def __init__(self, connector: KVConnector, source: bool) -> None:
        context = connector.context
        self._connector = connector
        self._digester = Digester(context.view, context.fingerprint)
        self._sinks: dict[bytes, SinkTransfer] = {}
        self._sources: dict[bytes, SourceTransfer] = {}
        self._busy = threading.Lock()  # one call at a time
        self._endpoint = b"" if source else connector.endpoint()

    def info(self) -> bytes:
        """Returns the endpoint at which sources reach this rank; empty for a source."""
        return self._endpoint

    def handle(self, message: bytes) -> bytes:
        with self._busy:
            return self._answer(lambda: decode_command(message))

    def handle_at_once(self, message: bytes) -> bytes | None:
        if not self._busy.acquire(blocking=False):
            return None
        try:
            command = decode_command(message)
            return self._answer(lambda: command) if self._is_short(command) else None
        except TransferError:
            return None  # `handle` answers with this error
        finally:
            self._busy.release()

    def _is_short(self, command: Command) -> bool:
        """Returns whether a command is soon served: a connector blocks only in `quiesce`, and much
        hashing takes time."""
        match command:
            case Accept() | Submit():
                return True
            case Ready(digest=digest):
                source = self._sources.get(command.transfer_id)
                rects = [piece.rect for piece, _ in source.pieces] if digest and source else []
                return self._is_hashed_soon(rects, command.run.count)
            case Verify(transfer_id, digests=digests):
                sink = self._sinks.get(transfer_id)
                count = len(sink.block_ids) if sink else 0
                few = len(digests) <= SHORT_RUNS
                return few and self._is_hashed_soon([self._connector.context.view.rect], count)
            case _:
                return False

    def _is_hashed_soon(self, rects: Sequence[Rect], count: int) -> bool:
        cache = self._connector.context.view.cache
        nbytes = sum(piece_nbytes(cache, rect, count) for rect in rects)
        return nbytes <= SHORT_NBYTES and (cache.device.type == "cpu" or not nbytes)

    def _answer(self, command: Callable[[], Command]) -> bytes:
        try:
            reply = self._serve(command())
        except TransferError as error:
            answer = RankError(error.message, error.code, error.blame.value, error.retryable)
            reply = Reply(error=answer)
        return msgspec.msgpack.encode(reply)

    def _serve(self, command: Command) -> Reply:
        match command:
            case Accept(transfer):
                self._connector.accept(transfer)
                self._sinks[transfer.transfer_id] = transfer
            case Submit(transfer):
                self._connector.submit(transfer)
                self._sources[transfer.transfer_id] = transfer
            case Ready():
                self._connector.ready(
                    command.transfer_id, command.run, command.block_ids, command.last
                )
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
        """Hashes a run while the connector delivers it."""
        transfer = self._sources.get(ready.transfer_id)
        if transfer is None or not ready.digest or not ready.run.count:
            return ()
        parts = [
            (piece.sink_rank, band)
            for piece, _ in transfer.pieces
            for band in self._digester.bands(piece.rect)
        ]
        ids = transfer.transfer_id, transfer.epoch
        made = self._digester.digests(
            [Hashed(*ids, band, ready.run, ready.block_ids) for _, band in parts]
        )
        return tuple(
            RunDigest(sink_rank, band, ready.run, digest)
            for (sink_rank, band), digest in zip(parts, made, strict=True)
        )

    def _verify(self, command: Verify) -> Reply:
        transfer = self._sinks.get(command.transfer_id)
        if transfer is None or transfer.epoch != command.epoch:
            raise _stopped()
        wrong, left = self._digester.verify(transfer, command.digests, command.start)
        return Reply(digests=tuple(wrong), left=left)

    def _forget(self, transfer_id: bytes) -> None:
        self._sinks.pop(transfer_id, None)
        self._sources.pop(transfer_id, None)

    def close(self, deadline: float) -> None:
        self._connector.close(deadline)
        self._digester.close()


def _stopped() -> TransferError:
    return TransferError("the transfer was stopped", code="UNKNOWN_TRANSFER")


class GroupCache(Protocol):
    """The cache of one KV group; it begins at byte `offset` of the memory file."""

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def shape(self) -> Part: ...
    @property
    def offset(self) -> int: ...


def build_worker_connector(
    caches: Sequence[GroupCache],
    shared_fd: int | None,
    rank: int,
    host: str,
    config: bytes,
    emit: Callable[[bytes], None],
) -> WorkerConnector:
    """Builds a rank's half; a worker calls it once its cache is allocated. `config` is a msgpack
    `RankConfig`; connectors bind to `host`; `shared_fd` is the memory file that holds the caches.

    Raises:
        ConfigError: an unknown connector or option, another API version, or a connector cannot
            reach the cache's memory.
    """
    settings = _configs.decode(config)
    (cache,) = caches
    context = RankContext(
        view=CacheView(cache.tensor, Rect.of(cache.shape), shared_fd, cache.offset),
        bind_host=host,
        fingerprint=settings.fingerprint,
        emit=lambda event: emit(encode_event(event)),
        keys=settings.keys,
    )
    children = {name: load_connector(name) for name in settings.connectors}
    if settings.source:
        check_readable(children, context.view)
    block_code()  # built here, before the first KV moves
    makers = {
        name: partial(kind, config=settings.connectors[name]) for name, kind in children.items()
    }
    return WorkerConnector(MultiConnector(context, makers), settings.source)


def check_readable(children: Mapping[str, type[KVConnector]], view: CacheView) -> None:
    """Raises ConfigError if the sinks of a child could not read this source's CPU cache."""
    if view.cache.device.type != "cpu" or view.shared_fd is not None:
        return
    for name, kind in children.items():
        if kind.capabilities.pull and kind.capabilities.same_host:
            raise ConfigError(
                f"connector {name!r} needs the cache in shared memory, which this one is not; "
                "choose another --kv-connector, such as tcp"
            )
