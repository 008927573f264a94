"""The rank half of the KV transfer: a rank's connectors, driven by the executor's messages.

It implements the `Extension` of `common/distributed/executor.py`: it lives in each rank, beside the
caches, and is served while a step computes. Each KV group has a connector of its own, so connectors
know one cache and nothing of groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import torch

from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.kv_transfer.commands import (
    RankError,
    Reply,
    decode_command,
    encode_endpoints,
    encode_event,
)
from pdserve.kv_transfer.connector import KVConnector, RankContext
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.frame import bad_frame
from pdserve.kv_transfer.layout import CacheView, Part, Rect
from pdserve.kv_transfer.native.code import block_code
from pdserve.kv_transfer.rank.group_connector import GroupConnector
from pdserve.kv_transfer.selection import RankConfig, load_connector

_configs = msgspec.msgpack.Decoder(RankConfig)


class WorkerConnector:
    """Serves the connectors of one rank, by KV group."""

    def __init__(self, groups: Mapping[int, GroupConnector]) -> None:
        self.groups = groups

    def info(self) -> bytes:
        """Returns the endpoints at which sources reach this rank."""
        return encode_endpoints({group: each.endpoint for group, each in self.groups.items()})

    def handle(self, message: bytes) -> bytes:
        try:
            group, command = decode_command(message)
            reply = self._of(group).handle(command)
        except TransferError as error:
            reply = _refusal(error)
        return msgspec.msgpack.encode(reply)

    def handle_at_once(self, message: bytes) -> bytes | None:
        reply: Reply | None
        try:
            group, command = decode_command(message)
            found = self._of(group)
        except TransferError:
            return None  # `handle` answers with this error
        try:
            reply = found.handle_at_once(command)
        except TransferError as error:
            reply = _refusal(error)
        return None if reply is None else msgspec.msgpack.encode(reply)

    def _of(self, group: int) -> GroupConnector:
        if (found := self.groups.get(group)) is None:
            raise bad_frame(f"no layer of KV group {group} is on this rank")
        return found

    def close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        for each in self.groups.values():
            each.close(max(0.0, end - time.monotonic()))


def _refusal(error: TransferError) -> Reply:
    return Reply(error=RankError(error.message, error.code, error.blame.value, error.retryable))


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
    children = {name: load_connector(name) for name in settings.connectors}
    makers = {
        name: partial(kind, config=settings.connectors[name]) for name, kind in children.items()
    }
    block_code()  # built here, before the first KV moves
    groups = {}
    for group, cache in enumerate(caches):
        view = CacheView(cache.tensor, Rect.of(cache.shape), shared_fd, cache.offset)
        if not view.rect.area:
            continue
        if settings.source:
            check_readable(children, view)
        context = RankContext(
            view=view,
            bind_host=host,
            fingerprint=group_fingerprint(settings.fingerprint, group),
            emit=lambda event, group=group: emit(encode_event(group, event)),  # type: ignore[misc]
            keys=settings.keys,
        )
        groups[group] = GroupConnector(MultiConnector(context, makers), settings.source)
    return WorkerConnector(groups)


def group_fingerprint(fingerprint: str, group: int) -> str:
    """Returns what connectors of one KV group compare, so that groups never meet each other."""
    return f"{fingerprint}/{group}" if group else fingerprint


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
