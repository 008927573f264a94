"""The rank half of the KV transfer: its connectors behind the executor's bytes.

It is the `Extension` of `common/distributed/executor.py`: it lives in each rank, beside the
cache, and is served while a step computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from common.config.schema import TLSConfig
from common.core.errors import Blame, ConfigError, TransferError
from kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from kv_transfer.connectors.multi import MultiConnector
from kv_transfer.digest import Digester, RunDigest
from kv_transfer.frame import bad_frame
from kv_transfer.layout import CacheView, Rect
from kv_transfer.selection import Connectors, load_connector


class CacheShape(Protocol):
    """What is needed of `common.engine.messages.CacheShape`."""

    @property
    def layer_start(self) -> int: ...
    @property
    def layer_end(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def head_end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank needs to build its connectors; msgpack in the worker's configuration."""

    connectors: Connectors
    fingerprint: str
    bind_host: str = "127.0.0.1"
    source: bool = False  # a source announces no endpoint


T = TypeVar("T")

FACTORY = "kv_transfer.rank:build_rank"  # what a worker imports


def rank_config(
    connectors: Connectors, bind_host: str, fingerprint: str, tls: TLSConfig, *, source: bool
) -> bytes:
    """The bytes `build_rank` wants, for a node's options.

    Raises:
        ConfigError: a connector shall use TLS and the node has no certificate.
    """
    spelt_out = {name: connector_options(options, tls) for name, options in connectors.items()}
    return msgspec.msgpack.encode(RankConfig(spelt_out, fingerprint, bind_host, source))


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


# ---- commands, from node to rank ----


class Accept(msgspec.Struct, tag=True):
    transfer: SinkTransfer


class Submit(msgspec.Struct, tag=True):
    transfer: SourceTransfer


class Ready(msgspec.Struct, tag=True):
    """With `digest`, the reply has one for each piece of the run."""

    transfer_id: bytes
    run: BlockRun
    block_ids: tuple[int, ...]
    last: bool
    digest: bool = False


class Verify(msgspec.Struct, tag=True):
    """The reply has the digests that are wrong, of those meant for this rank."""

    transfer_id: bytes
    digests: tuple[RunDigest, ...]


class Quiesce(msgspec.Struct, tag=True):
    """May take up to `gate.GRACE_S` when a peer has stalled."""

    transfer_id: bytes


class Release(msgspec.Struct, tag=True):
    transfer_id: bytes


Command = Accept | Submit | Ready | Verify | Quiesce | Release


class Reply(msgspec.Struct):
    error: Fault | None = None
    digests: tuple[RunDigest, ...] = ()


class Fault(msgspec.Struct):
    """A PdserveError on its way to the node."""

    message: str
    code: str
    blame: str
    retryable: bool


_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)
_tagged_event = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_events: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (Progress, Landed, Sent, Failed)
}


def encode_event(event: Event) -> bytes:
    return msgspec.msgpack.encode((type(event).__name__, event))


def decode_event(message: bytes) -> Event:
    """Raises TransferError BAD_FRAME."""
    name, body = _decode(_tagged_event, message)
    if name not in _events:
        raise bad_frame(f"no event is called {name!r}")
    event: Event = _decode(_events[name], body)
    return event


def _decode(decoder: msgspec.msgpack.Decoder[T], message: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_frame(f"not what a rank and its node say: {error}") from error


class TransferRank:
    """Serves one rank's connector, and makes the digests it need not know of."""

    def __init__(self, connector: KVConnector, source: bool) -> None:
        context = connector.context
        self._connector = connector
        self._digester = Digester(context.view, context.fingerprint)
        self._sinks: dict[bytes, SinkTransfer] = {}
        self._sources: dict[bytes, SourceTransfer] = {}
        self._endpoint = b"" if source else connector.endpoint()

    def info(self) -> bytes:
        """The endpoint sources reach this rank at; empty for a source."""
        return self._endpoint

    def handle(self, message: bytes) -> bytes:
        try:
            reply = self._serve(_decode(_commands, message))
        except TransferError as error:
            fault = Fault(error.message, error.code, error.blame.value, error.retryable)
            reply = Reply(error=fault)
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
            case Verify(transfer_id, digests):
                return Reply(digests=self._verify(transfer_id, digests))
            case Quiesce(transfer_id):
                self._forget(transfer_id)
                self._connector.quiesce(transfer_id)
            case Release(transfer_id):
                self._forget(transfer_id)
                self._connector.release(transfer_id)
        return Reply()

    def _digest(self, ready: Ready) -> tuple[RunDigest, ...]:
        """Made while the connector delivers the run."""
        transfer = self._sources.get(ready.transfer_id)
        if transfer is None or not ready.digest or not ready.run.count:
            return ()
        ids = (transfer.transfer_id, transfer.epoch)
        return tuple(
            RunDigest(
                piece.sink_rank,
                piece.rect,
                ready.run,
                self._digester.digest(*ids, piece.rect, ready.run, ready.block_ids),
            )
            for piece, _ in transfer.pieces
        )

    def _verify(self, transfer_id: bytes, digests: tuple[RunDigest, ...]) -> tuple[RunDigest, ...]:
        transfer = self._sinks.get(transfer_id)
        if transfer is None:
            raise TransferError("the transfer was stopped", code="UNKNOWN_TRANSFER")
        return tuple(self._digester.verify(transfer, digests))

    def _forget(self, transfer_id: bytes) -> None:
        self._sinks.pop(transfer_id, None)
        self._sources.pop(transfer_id, None)

    def close(self, deadline: float) -> None:
        self._connector.close(deadline)


def build_rank(
    cache: torch.Tensor,
    shape: CacheShape,
    shared_fd: int | None,
    rank: int,
    config: bytes,
    emit: Callable[[bytes], None],
) -> TransferRank:
    """The factory a worker calls once its cache is allocated. `config` is a msgpack
    `RankConfig`; `shared_fd` is the memory file whose first byte is the cache's.

    Raises:
        ConfigError: no such connector, an unknown option, another API version, or the cache is
            not where a connector can reach it.
    """
    settings = msgspec.msgpack.decode(config, type=RankConfig)
    rect = Rect(shape.layer_start, shape.layer_end, shape.head_start, shape.head_end)
    context = RankContext(
        view=CacheView(cache, rect, shared_fd),
        bind_host=settings.bind_host,
        fingerprint=settings.fingerprint,
        emit=lambda event: emit(encode_event(event)),
    )
    children = {name: load_connector(name) for name in settings.connectors}
    if settings.source:
        check_readable(children, context.view)
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


# ---- the node's end ----

Call = Callable[[int, bytes], Awaitable[bytes]]  # Executor.call


async def call_rank(call: Call, rank: int, command: Command) -> Reply:
    """Raises TransferError when the rank's connector did."""
    reply = _decode(_replies, await call(rank, msgspec.msgpack.encode(command)))
    if (fault := reply.error) is not None:
        raise TransferError(
            fault.message, code=fault.code, blame=Blame(fault.blame), retryable=fault.retryable
        )
    return reply


async def call_ranks(call: Call, commands: Mapping[int, Command]) -> list[Reply]:
    """Calls several ranks at once and waits for all of them; raises the first one's error."""
    calls = (call_rank(call, rank, command) for rank, command in commands.items())
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Reply)]


async def call_living(call: Call, commands: Mapping[int, Command]) -> int:
    """As `call_ranks`, but returns how many ranks could not answer: a dead rank reads and
    writes nothing any more, and its node ends soon."""
    calls = (call_rank(call, rank, command) for rank, command in commands.items())
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return sum(isinstance(answer, BaseException) for answer in answers)


def failure(event: Failed) -> TransferError:
    return TransferError(
        event.message, code=event.code, blame=Blame(event.blame), retryable=event.retryable
    )
