"""Fake CUDA streams, which record on which stream operations on a cache are queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeStreams:
    """Makes every `OwnStream` of a process. `queued`: in order, "read" or "write" of a watched
    cache with the stream it was queued on (None: the model's), and "sync"."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, FakeStream | None]] = []
        self.current: FakeStream | None = None

    def __call__(self, device: torch.device) -> FakeStream:
        return FakeStream(self)

    @property
    def touched(self) -> list[str]:
        return [what for what, _ in self.queued if what != "sync"]

    def check(self) -> None:
        """Fails for an access outside of a connector's own stream, and for a write without a later
        synchronize: the sequence that gets the blocks computes on the model's stream."""
        for what, stream in self.queued:
            assert stream is not None, f"{what} on the model's stream"
        unseen: set[FakeStream | None] = set()
        for what, stream in self.queued:
            if what == "write":
                unseen.add(stream)
            elif what == "sync":
                unseen.discard(stream)
        assert not unseen, "a write is not waited for"


class FakeStream:
    """An `OwnStream`."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams

    @contextmanager
    def active(self) -> Iterator[None]:
        before, self._streams.current = self._streams.current, self
        yield
        self._streams.current = before

    def synchronize(self) -> None:
        self._streams.queued.append(("sync", self))


class Watch(TorchDispatchMode):
    """Reports operations on the memory of `caches` to `streams`, except for views."""

    def __init__(self, streams: FakeStreams, *caches: torch.Tensor) -> None:
        super().__init__()
        self._streams = streams
        self._watched = {_memory(cache) for cache in caches}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not _is_view(func) and any(_memory(each) in self._watched for each in leaves):
            writes = func._schema.is_mutable and _memory(leaves[0]) in self._watched
            what = "write" if writes else "read"
            self._streams.queued.append((what, self._streams.current))
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
