"""A checkpoint folder as a rank reads it: from its own disk (here), or from another rank
(`broadcast.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pdserve.common.model.checkpoint import Checkpoint, open_checkpoint
from pdserve.common.model.sharding import Shard

View = Callable[[Checkpoint], Checkpoint]
"""Returns a view of a checkpoint's tensors; raises ConfigError if it cannot be used."""


class OpenWeights(Protocol):
    """The weights of a folder. Read them once, with one of the two iterators, to its end.

    Raises:
        ConfigError: the files cannot be read.
    """

    @property
    def tensors(self) -> Checkpoint:
        """The tensors, with their shapes and dtypes."""

    def read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Tensor]]:
        """Yields each shard with its part of the tensor of that name, tensor by tensor in the order
        of the files."""

    def readable(self, groups: Sequence[Collection[str]]) -> Iterator[int]:
        """Yields the index of each group of names when its `tensors` can be read, which they can
        until the next iteration."""


class ModelFolder:
    """A folder on this host's disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Yields a folder with the files besides weights: configuration and tokenizer."""
        yield self.path

    def weights(self, view: View) -> AbstractContextManager[OpenWeights]:
        """Opens the weights as seen through `view`. Raises ConfigError."""
        return self._mapped(view)

    @contextmanager
    def _mapped(self, view: View) -> Iterator[OpenWeights]:
        with ExitStack() as stack:
            yield _Mapped(view(open_checkpoint(self.path, stack)))


class _Mapped:
    def __init__(self, tensors: Checkpoint) -> None:
        self.tensors = tensors

    def read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Tensor]]:
        wanted = by_name(shards)
        for name, tensor in self.tensors.items():
            for shard in wanted.get(name, ()):
                yield shard, tensor[shard.index]

    def readable(self, groups: Sequence[Collection[str]]) -> Iterator[int]:
        yield from range(len(groups))


def by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """Returns the shards of each tensor."""
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return found
