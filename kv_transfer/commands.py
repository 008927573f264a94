"""The messages between a node and its ranks about KV transfers: commands, replies, events.

Commands travel as the bytes of `Executor.call`, events as those of `Executor.on_event`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

import msgspec

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    RunDigest,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.frame import bad_frame
from pdserve.kv_transfer.layout import Share

T = TypeVar("T")

# ---- commands, from node to rank ----


class Accept(msgspec.Struct, tag=True):
    transfer: SinkTransfer


class Submit(msgspec.Struct, tag=True):
    transfer: SourceTransfer


class Ready(msgspec.Struct, tag=True):
    """Announces a run. With `digest`, the reply has a digest of each piece of the run, or says that
    `Sent` will bring them."""

    transfer_id: bytes
    run: BlockRun
    block_ids: tuple[int, ...]
    last: bool
    digest: bool = False


class Verify(msgspec.Struct, tag=True):
    """Compares this rank's blocks with `digests`, from number `start` on. The reply has the
    differing digests among the next few, and how many are `left` for another call."""

    transfer_id: bytes
    epoch: int
    digests: tuple[RunDigest, ...]
    start: int = 0


class Quiesce(msgspec.Struct, tag=True):
    """Asks the rank to quiesce. The answer takes a moment when a peer has stalled."""

    transfer_id: bytes


class Release(msgspec.Struct, tag=True):
    transfer_id: bytes


Command = Accept | Submit | Ready | Verify | Quiesce | Release


class Reply(msgspec.Struct):
    error: RankError | None = None
    digests: tuple[RunDigest, ...] = ()
    left: int = 0
    hashed_as_sent: bool = False


class RankError(msgspec.Struct):
    """Carries a PdserveError to the node."""

    message: str
    code: str
    blame: str
    retryable: bool


_commands = msgspec.msgpack.Decoder(tuple[int, Command])
_replies = msgspec.msgpack.Decoder(Reply)
_tagged_event = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_events: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)
}


def encode_command(group: int, command: Command) -> bytes:
    return msgspec.msgpack.encode((group, command))


def decode_command(message: bytes) -> tuple[int, Command]:
    """Returns (KV group, command). Raises TransferError BAD_FRAME when `message` is no command."""
    return _decode(_commands, message)


def encode_event(group: int, event: Event) -> bytes:
    return msgspec.msgpack.encode((group, type(event).__name__, event))


def decode_event(message: bytes) -> tuple[int, Event]:
    """Returns (KV group, event). Raises TransferError BAD_FRAME."""
    group, name, body = _decode(_tagged_event, message)
    if name not in _events:
        raise bad_frame(f"no event is called {name!r}")
    event: Event = _decode(_events[name], body)
    return group, event


def _decode(decoder: msgspec.msgpack.Decoder[T], message: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_frame(f"no message between a rank and its node: {error}") from error


# ---- announced by a rank ----

_endpoints = msgspec.msgpack.Decoder(dict[int, bytes])


def encode_endpoints(endpoints: Mapping[int, bytes]) -> bytes:
    """`endpoints`: by KV group, where sources reach a rank."""
    return msgspec.msgpack.encode(endpoints)


def decode_endpoints(message: bytes) -> dict[int, bytes]:
    """Returns no endpoint for the empty message of a rank without connectors. Raises TransferError
    BAD_FRAME."""
    return _decode(_endpoints, message) if message else {}


# ---- the node's end ----

Call = Callable[[int, bytes], Awaitable[bytes]]  # Executor.call


class RankCalls:
    """Sends commands to the ranks of a node, for one of its shares each. `counts` belong to its
    half of the hand-off."""

    def __init__(self, call: Call, counts: Counter[str], shares: Sequence[Share]) -> None:
        self.call = call
        self.counts = counts
        self._places = [(each.rank, each.group) for each in shares]
        self._numbers = {place: number for number, place in enumerate(self._places)}

    def decode_event(self, rank: int, message: bytes) -> tuple[int, Event]:
        """Returns (number of the share, event) of a rank's message. Raises TransferError."""
        group, event = decode_event(message)
        if (number := self._numbers.get((rank, group))) is None:
            raise bad_frame(f"rank {rank} has no share of KV group {group}")
        return number, event

    async def send(self, share: int, command: Command) -> Reply:
        """Raises the TransferError that the share's connector raised."""
        rank, group = self._places[share]
        reply = _decode(_replies, await self.call(rank, encode_command(group, command)))
        if reply.error is not None:
            raise transfer_error(reply.error)
        return reply

    async def send_all(self, commands: Mapping[int, Command]) -> list[Reply]:
        """Calls for several shares at once and waits for all; raises the first error."""
        return await all_of(self.send(share, command) for share, command in commands.items())

    async def send_alive(self, shares: Iterable[int], command: Command) -> list[Reply]:
        """Calls for several shares and counts ranks that cannot answer instead of raising: a dead
        rank touches no block, and its node ends soon."""
        calls = (self.send(share, command) for share in shares)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        self.counts["dead_rank"] += sum(isinstance(each, BaseException) for each in answers)
        return [each for each in answers if not isinstance(each, BaseException)]


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Waits for all calls; raises the first error. A single call gets no task of its own, so an
    answer that is ready costs no turn of the loop."""
    waiting = list(calls)
    if len(waiting) == 1:
        return [await waiting[0]]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[T], answers)


def transfer_error(failure: RankError | Failed) -> TransferError:
    return TransferError(
        failure.message,
        code=failure.code,
        blame=Blame(failure.blame),
        retryable=failure.retryable,
    )
