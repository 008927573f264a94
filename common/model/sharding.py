"""How a rank's tensors are created, and which parts of a checkpoint fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.all2all import All2AllManager, Replicated
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.kernels.ops import Kernels, TorchKernels


def _as_it_is(part: Tensor) -> Tensor:
    return part


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one checkpoint tensor that this rank keeps."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[slice, ...]  # the part that this rank reads
    target: Tensor  # destination; may be a view of a fused weight
    convert: Callable[[Tensor], Tensor] = _as_it_is  # from the tensor read to the one stored
    finish: Callable[[], None] = _nothing  # called when all shards of the model are filled


def ranges(index: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the start and end along each dimension; dimensions without an index are whole, as all
    are for `...`."""
    slices = () if index is ... else index if isinstance(index, tuple) else (index,)
    slices += (slice(None),) * (len(shape) - len(slices))
    return [each.indices(size)[:2] for each, size in zip(slices, shape, strict=True)]


class Sharded(Protocol):
    """An object with weights."""

    def shards(self) -> Iterator[Shard]:
        """Yields this rank's parts of the checkpoint."""


def shards_of(*parts: Sharded) -> Iterator[Shard]:
    """Yields the shards of several layers, in order."""
    for part in parts:
        yield from part.shards()


@dataclass(frozen=True, slots=True)
class Sharding:
    """A rank's device, dtype, parallel groups, weight format and kernels."""

    group: GroupCoordinator  # tensor-parallel
    device: torch.device
    dtype: torch.dtype  # of computation, and of weights that are not quantized
    all2all: All2AllManager = field(default_factory=lambda: Replicated(GroupCoordinator()))
    """Moves tokens between the ranks of `group` that hold different experts; None: each has all."""
    quantization: Quantization | None = None
    kernels: Kernels = field(default_factory=TorchKernels)
    kv_cache_dtype: str = KV_AUTO  # one of KV_CACHE_DTYPES
    blocks: int = 1  # blocks in which split inputs are summed (`MatrixPart.blocks`)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def split(self, total: int) -> slice:
        """Returns this rank's equal share of `total`, a multiple of the group's size."""
        share = total // self.group.size
        return slice(self.group.rank * share, (self.group.rank + 1) * share)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The part of a checkpoint's matrix that this rank keeps."""

    name: str  # module
    shape: tuple[int, int]  # of the whole matrix: outputs, inputs
    rows: slice
    columns: slice
    blocks: int = 1
    """The number of blocks, a power of two, into which the whole matrix's inputs are cut; kernels
    sum each block separately."""

    @property
    def count(self) -> int:
        """The number of rows kept."""
        return int(self.rows.stop - self.rows.start)

    def block(self, fits: Callable[[int], bool]) -> int:
        """Returns the inputs per block: of fewer, larger blocks if their size does not fit; all
        that this rank keeps if these are not whole blocks."""
        blocks, own = self.blocks, self.columns.stop - self.columns.start
        while blocks > 1 and (self.shape[1] % blocks or not fits(self.shape[1] // blocks)):
            blocks //= 2
        block = self.shape[1] // blocks
        return int(own if own % block else block)


def rows_of(parts: Sequence[MatrixPart]) -> int:
    return sum(part.count for part in parts)


def columns_of(parts: Sequence[MatrixPart]) -> slice:
    """Returns the inputs that this rank keeps, equal for all parts."""
    return parts[0].columns


def whole_words_of(itemsize: int) -> Callable[[int], bool]:
    """Returns a predicate: whether a number of elements fills whole 32-bit words."""
    return lambda inputs: inputs * itemsize % 4 == 0
