"""Messages about a node's prefix cache: the KV events of vLLM, in MessagePack.

A batch is an array `[ts, events, data_parallel_rank]`, an event a map whose `type` is its class, as
in vLLM 0.33. A block is named by `short_hash`. Fields are only ever added, with a default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

MEDIUM = "GPU"  # vLLM's word for the cache that steps read, on CPUs too


class BlockStored(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Consecutive blocks were added to the prefix cache. Snapshots, and messages to routers, have
    no `token_ids`; snapshots have no parent either."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first one begins a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None  # always None, as adapters have no numbers
    medium: str | None = MEDIUM
    lora_name: str | None = None  # the adapter's digest


class BlockRemoved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Blocks were removed, in any order."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All blocks were removed. A snapshot begins with this event."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The changes in one turn of the event loop, in order."""

    ts: float  # Unix time by the node's clock
    events: list[KVEvent]
    data_parallel_rank: int | None = None  # the replica


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


class _LazyBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_lazy_decoder = msgspec.msgpack.Decoder(_LazyBatch)
_event_decoder = msgspec.msgpack.Decoder(KVEvent)


def encode_batch(batch: KVEventBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(message: bytes) -> KVEventBatch:
    """Decodes a batch; raises msgspec.DecodeError if the bytes are something else."""
    return _decoder.decode(message)


def decode_events(message: bytes) -> tuple[int, Iterator[KVEvent]]:
    """Returns the replica of a batch, and its events, each decoded when it is asked for: all of
    them at once would hold an event loop for long. Both raise msgspec.DecodeError if the bytes are
    something else."""
    batch = _lazy_decoder.decode(message)
    return batch.data_parallel_rank or 0, map(_event_decoder.decode, batch.events)


def num_blocks(batch: KVEventBatch) -> int:
    """Returns how many blocks the batch names."""
    return sum(
        len(each.block_hashes) for each in batch.events if not isinstance(each, AllBlocksCleared)
    )


def without_tokens(batch: KVEventBatch) -> KVEventBatch:
    """Returns the batch without token ids, for receivers that compute the hashes themselves."""
    replace = msgspec.structs.replace
    events = [
        replace(each, token_ids=[]) if isinstance(each, BlockStored) else each
        for each in batch.events
    ]
    return replace(batch, events=events)
