"""The rank half of the KV transfer: its connectors behind the executor's bytes.

It is the `Extension` of `common/distributed/executor.py`: it lives in each rank, beside the
cache, and is served while a step computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from pdserve.common.config.shared import TLSConfig
from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.common.core.host import leave
from pdserve.common.rpc.auth import ClusterKey
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
    VerifyMore,
    decode_command,
    encode_event,
)
from pdserve.kv_transfer.connector import KVConnector, RankContext, SinkTransfer, SourceTransfer
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import CacheView, Part, Rect
from pdserve.kv_transfer.native.code import block_code
from pdserve.kv_transfer.rank.digester import Digester, Hashed, Verification
from pdserve.kv_transfer.selection import Connectors, load_connector

logger = logging.getLogger(__name__)

# What is hashed while a call waits for it, rather than on a thread: in less time than it takes to
# wake one that others keep from the interpreter.
SHORT_NBYTES = 512 << 10
SHORT_RUNS = 64


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank needs to build its connectors; msgpack in the worker's configuration."""

    connectors: Connectors
    fingerprint: str
    source: bool = False  # a source announces no endpoint
    keys: tuple[bytes, ...] = field(default=(), repr=False)  # as `RankContext` has them


_configs = msgspec.msgpack.Decoder(RankConfig)


KEY_PURPOSE = "KV connections"  # ranks and plugins get a key for this, not the cluster's
FACTORY = "pdserve.kv_transfer.rank.transfer_rank:build_rank"  # what a worker imports


def rank_config(
    connectors: Connectors,
    fingerprint: str,
    tls: TLSConfig,
    *,
    source: bool,
    key: ClusterKey | None = None,
) -> bytes:
    """The bytes `build_rank` wants, for a node's options; they are a secret if there is a `key`. KV
    that leaves the host is encrypted where gRPC is, and its ports ask for the key, unless the
    connector cannot or was told not to, which is logged.

    Raises:
        ConfigError: a connector shall use TLS and the node has no certificate.
    """
    for name in connectors if key is not None else ():
        if not load_connector(name).capabilities.authenticates:
            logger.warning("gRPC asks for the cluster key, but KV that goes by %s does not", name)
    spelt_out = {
        name: connector_options(_encrypted(name, options, tls), tls)
        for name, options in connectors.items()
    }
    keys = () if key is None else key.derive(KEY_PURPOSE)
    return msgspec.msgpack.encode(RankConfig(spelt_out, fingerprint, source, keys))


def _encrypted(name: str, options: Mapping[str, Any], tls: TLSConfig) -> Mapping[str, Any]:
    """The options of a connector, with TLS where nothing was said of it."""
    if tls.tls_cert is None or load_connector(name).capabilities.same_host:
        return options
    if name == "tcp" and not any(key.startswith("tls") for key in options):
        return {**options, "tls": True}
    if name != "tcp" or options.get("tls") is False:
        logger.warning("gRPC is encrypted, but KV that goes by %s is not", name)
    return options


def connector_options(options: Mapping[str, Any], tls: TLSConfig) -> dict[str, Any]:
    """`--kv-connector-config` with `"tls": true` spelt out as the node's own files: a connector
    sees no options but these."""
    rest = {name: value for name, value in options.items() if name != "tls"}
    if options.get("tls", False) is False:
        return rest
    if tls.tls_cert is None or options["tls"] is not True:
        raise ConfigError(
            '--kv-connector-config: "tls" is true or false; true needs --tls-cert, --tls-key and '
            "--tls-ca"
        )
    return {**asdict(tls), **rest}


class TransferRank:
    """Serves one rank's connector, and makes the digests it need not know of."""

    def __init__(self, connector: KVConnector, source: bool) -> None:
        context = connector.context
        self._connector = connector
        self._digester = Digester(context.view, context.fingerprint)
        self._sinks: dict[bytes, SinkTransfer] = {}
        self._sources: dict[bytes, SourceTransfer] = {}
        self._verifications: dict[bytes, Verification] = {}  # of sinks
        self._busy = threading.Lock()  # one call at a time
        self._endpoint = b"" if source else connector.endpoint()

    def info(self) -> bytes:
        """The endpoint sources reach this rank at; empty for a source."""
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
            return None  # it is none: `handle` says so
        finally:
            self._busy.release()

    def _is_short(self, command: Command) -> bool:
        """No method of a connector blocks but `quiesce`; hashing takes its time."""
        match command:
            case Accept() | Submit():
                return True
            case Ready(digest=digest):
                source = self._sources.get(command.transfer_id)
                rects = [piece.rect for piece, _ in source.pieces] if digest and source else []
                return self._hashed_soon(rects, command.run.count)
            case Verify(transfer_id, digests=digests):
                sink = self._sinks.get(transfer_id)
                count = len(sink.block_ids) if sink else 0
                few = len(digests) <= SHORT_RUNS
                return few and self._hashed_soon([self._connector.context.view.rect], count)
            case _:
                return False

    def _hashed_soon(self, rects: Sequence[Rect], count: int) -> bool:
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
            case VerifyMore():
                return self._verify_more(command)
            case Quiesce(transfer_id):
                self._forget(transfer_id)
                self._quiesce(transfer_id)
            case Release(transfer_id):
                self._forget(transfer_id)
                self._connector.release(transfer_id)
        return Reply()

    def _quiesce(self, transfer_id: bytes) -> None:
        """The blocks will belong to other sequences next: a connector that may still write to them,
        or lets a peer read them, must end with this process."""
        try:
            self._connector.quiesce(transfer_id)
        except Exception:
            logger.critical(
                "the KV connector does not leave a transfer's blocks: this process ends",
                exc_info=True,
            )
            leave(1)

    def _digest(self, ready: Ready) -> tuple[RunDigest, ...]:
        """Made while the connector delivers the run."""
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
        verification = self._digester.verify(transfer, command.digests)
        self._verifications[command.transfer_id] = verification
        return Reply(digests=tuple(verification.step()), left=verification.left)

    def _verify_more(self, command: VerifyMore) -> Reply:
        verification = self._verifications.get(command.transfer_id)
        if verification is None or verification.transfer.epoch != command.epoch:
            raise _stopped()
        return Reply(digests=tuple(verification.step()), left=verification.left)

    def _forget(self, transfer_id: bytes) -> None:
        self._verifications.pop(transfer_id, None)
        self._sinks.pop(transfer_id, None)
        self._sources.pop(transfer_id, None)

    def close(self, deadline: float) -> None:
        self._connector.close(deadline)
        self._digester.close()


def _stopped() -> TransferError:
    return TransferError("the transfer was stopped", code="UNKNOWN_TRANSFER")


def build_rank(
    cache: torch.Tensor,
    shape: Part,
    shared_fd: int | None,
    rank: int,
    host: str,
    config: bytes,
    emit: Callable[[bytes], None],
) -> TransferRank:
    """The factory a worker calls once its cache is allocated. `config` is a msgpack
    `RankConfig`; `host` is what connectors bind to; `shared_fd` is the memory file whose first byte
    is the cache's.

    Raises:
        ConfigError: no such connector, an unknown option, another API version, or the cache is
            not where a connector can reach it.
    """
    settings = _configs.decode(config)
    context = RankContext(
        view=CacheView(cache, Rect.of(shape), shared_fd),
        bind_host=host,
        fingerprint=settings.fingerprint,
        emit=lambda event: emit(encode_event(event)),
        keys=settings.keys,
    )
    children = {name: load_connector(name) for name in settings.connectors}
    if settings.source:
        check_readable(children, context.view)
    block_code()  # built now, not when the first KV moves
    makers = {
        name: partial(kind, config=settings.connectors[name]) for name, kind in children.items()
    }
    return TransferRank(MultiConnector(context, makers), settings.source)


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
