"""A checkpoint folder that only one rank's host has (--load-broadcast).

    rank with the folder   files ─▶ names and shapes ─▶ rows of one tensor after another ─▶ end
    every rank                      what is wanted ─▶   keeps its parts of the rows

Tensors go file by file, a few MiB of rows at a time, and only those that some rank wants. A message
may instead say why the reader failed; then all ranks raise that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from pdserve.common.model.folder import ModelFolder, OpenWeights, View, by_name
from pdserve.common.model.sharding import Shard, ranges

CHUNK_BYTES = 16 << 20  # of a file
CHUNK_NUMBERS = 4 << 20  # of a tensor, whose rows are not divided
SMALL_FILES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files that are read besides weights."""

Message = dict[str, Any]
_END: Message = {"end": True}


class Broadcast:
    """Messages from one rank of a group to all. All ranks make the same calls."""

    def __init__(self, group: GroupCoordinator, src: int) -> None:
        self.group, self.src = group, src
        self.is_source = group.rank == src

    def relayed(self, messages: Callable[[], Iterator[Message]]) -> Iterator[Message]:
        """Yields on every rank what `messages` yields on the source. Iterate to the end.

        Raises:
            ConfigError: on all ranks, when the source's iterator raises.
        """
        source = messages() if self.is_source else None
        while True:
            message = self.group.broadcast_tensor_dict(_next(source), self.src)
            if "failed" in message:
                raise ConfigError(message["failed"])
            if "end" in message:
                return
            yield message


def _next(source: Iterator[Message] | None) -> Message | None:
    if source is None:
        return None
    try:
        return next(source, _END)
    except ConfigError as error:
        return {"failed": error.message}
    except Exception as error:  # of a file, a format or a lack of memory
        return {"failed": f"the checkpoint cannot be read: {error}"}


class BroadcastFolder(ModelFolder):
    """A folder on the host of rank `src`. Making one is a collective call, as is all reading of
    weights. Raises ConfigError."""

    def __init__(self, path: str | Path, group: GroupCoordinator, src: int) -> None:
        super().__init__(path)
        self._broadcast = Broadcast(group, src)
        self._files: dict[str, bytearray] = {}
        for message in self._broadcast.relayed(lambda: _files(self.path)):
            part = message["data"].numpy().tobytes()
            if not self._broadcast.is_source:
                self._files.setdefault(Path(message["file"]).name, bytearray()).extend(part)

    @contextmanager
    def files(self) -> Iterator[Path]:
        if self._broadcast.is_source:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
            try:
                for name, content in self._files.items():
                    Path(folder, name).write_bytes(content)
            except OSError as error:
                raise OSError(error.errno, error.strerror, folder) from error
            yield Path(folder)

    @contextmanager
    def weights(self, view: View) -> Iterator[OpenWeights]:
        with ExitStack() as stack:
            opened: dict[str, StoredTensor] = {}

            def catalogue() -> Iterator[Message]:
                opened.update(view(open_checkpoint(self.path, stack)))
                yield {
                    name: [tensor.get_dtype(), *tensor.get_shape()]
                    for name, tensor in opened.items()
                }

            (names,) = self._broadcast.relayed(catalogue)
            yield _Arriving(self._broadcast, opened, names)


def _files(folder: Path) -> Iterator[Message]:
    for path in sorted(folder.iterdir()):
        if path.suffix in SMALL_FILES and path.is_file():
            with path.open("rb") as file:
                more = True
                while more:
                    part = np.frombuffer(file.read(CHUNK_BYTES), np.uint8).copy()
                    yield {"file": path.name, "data": torch.from_numpy(part)}
                    more = len(part) == CHUNK_BYTES


class _Entry:
    """A tensor, readable while `here` holds its rows."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._dtype, self._shape = dtype, shape
        self.here: Tensor | None = None

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> Tensor:
        assert self.here is not None, "tensors are read when they are readable"
        return self.here[index]


class _Arriving:
    """Weights that arrive in the order in which the source reads them."""

    def __init__(
        self, broadcast: Broadcast, opened: Checkpoint, names: Mapping[str, list[Any]]
    ) -> None:
        """`opened`: on the source, what it reads."""
        self._broadcast, self._opened = broadcast, opened
        self.tensors = {name: _Entry(dtype, shape) for name, (dtype, *shape) in names.items()}

    def read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Tensor]]:
        wanted = by_name(shards)
        indices = {name: [shard.index for shard in each] for name, each in wanted.items()}
        for name, parts in self._arrivals(indices):
            yield from zip(wanted[name], parts, strict=True)
            del parts  # before there are those of the next tensor

    def readable(self, groups: Sequence[Collection[str]]) -> Iterator[int]:
        group_of = {name: number for number, names in enumerate(groups) for name in names}
        missing = [set(names) for names in groups]
        yield from (number for number, names in enumerate(groups) if not names)
        for name, (whole,) in self._arrivals({name: [()] for name in group_of}):
            self.tensors[name].here = whole
            missing[number := group_of[name]].remove(name)
            if not missing[number]:
                yield number
                for each in groups[number]:
                    self.tensors[each].here = None

    def _arrivals(
        self, wanted: Mapping[str, Sequence[tuple[slice, ...]]]
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields the parts of each tensor that this rank wants, once all its rows have arrived."""
        flags = torch.tensor([name in wanted for name in self.tensors], dtype=torch.bool)
        by_any = self._broadcast.group.all_reduce(flags).tolist()
        names = [name for name, sent in zip(self.tensors, by_any, strict=True) if sent]
        parts: list[_Part] = []
        for message in self._broadcast.relayed(lambda: _rows(self._opened, names)):
            name, rows = message["tensor"], message["rows"]
            if not self._broadcast.is_source:
                self._verify(message)
            if name not in wanted:
                continue
            shape, first = self.tensors[name].get_shape(), message["first"]
            if first == 0:
                parts = [_Part(index, shape, rows.dtype) for index in wanted[name]]
            for part in parts:
                part.take(rows, first)
            if not shape or first + len(rows) == shape[0]:
                yield name, [part.tensor for part in parts]
                parts = []

    def _verify(self, message: Message) -> None:
        if _digest(message["rows"]) != message["digest"]:
            raise NodeError(
                f"rank {self._broadcast.group.rank} received other bytes of {message['tensor']} "
                f"than rank {self._broadcast.src} sent: check the network between them",
                code="RANKS_DISAGREE",
            )


class _Part:
    """A part of a tensor, filled row by row."""

    def __init__(self, index: tuple[slice, ...], shape: list[int], dtype: torch.dtype) -> None:
        self._ranges = ranges(index, shape)
        self.tensor = torch.empty([end - start for start, end in self._ranges], dtype=dtype)

    def take(self, rows: Tensor, first: int) -> None:
        """Copies the rows it needs from `rows`, the first of which has the index `first`."""
        if not self._ranges:
            self.tensor.copy_(rows)
            return
        (start, end), *others = self._ranges
        low, high = max(start, first), min(end, first + len(rows))
        if low < high:
            part = rows[low - first : high - first][:, *(slice(*each) for each in others)]
            self.tensor[low - start : high - start].copy_(part)


def _rows(opened: Checkpoint, names: Iterable[str]) -> Iterator[Message]:
    for name in names:
        tensor = opened[name]
        for first, index in _runs(tensor.get_shape()):
            rows = tensor[index].contiguous()
            yield {"tensor": name, "first": first, "digest": _digest(rows), "rows": rows}


def _runs(shape: list[int]) -> Iterator[tuple[int, Any]]:
    """Yields the first row and the index of each run of rows that are sent together."""
    if not shape:
        yield 0, ()
        return
    count = max(1, CHUNK_NUMBERS // max(1, prod(shape[1:])))
    for first in range(0, max(1, shape[0]), count):
        yield first, (slice(first, min(first + count, shape[0])),)


def _digest(rows: Tensor) -> str:
    data: Any = rows.flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data)
