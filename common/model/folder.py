"""A checkpoint folder as a rank reads it: from its own disk here, or from another rank's, see
`broadcast.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pdserve.common.model.checkpoint import Checkpoint, open_checkpoint
from pdserve.common.model.sharding import Shard

View = Callable[[Checkpoint], Checkpoint]
"""Shows a checkpoint's tensors as others, or refuses them with a ConfigError."""


class OpenWeights(Protocol):
    """The weights of a folder, to be read once, by one of the two methods, which must be used up.

    Raises:
        ConfigError: what is stored cannot be read.
    """

    @property
    def tensors(self) -> Checkpoint:
        """The tensors, with their shapes and dtypes."""

    def read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Tensor]]:
        """Yields each shard with its part of the tensor of that name, tensor by tensor in the order
        of the files."""

    def readable(self, groups: Sequence[Collection[str]]) -> Iterator[int]:
        """Yields the number of each group of names when its `tensors` can be read, which holds
        until the next one."""


class ModelFolder:
    """A folder on this host's disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Gives a folder with all that is not weights: the configuration and the tokenizer."""
        yield self.path

    def weights(self, view: View) -> AbstractContextManager[OpenWeights]:
        """Opens the weights, shown by `view`. Raises ConfigError."""
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
