"""Where one rank's tensors live, and which parts of a checkpoint go into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

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
    index: tuple[slice, ...]  # what this rank reads of it
    target: Tensor  # where it goes; may be a view into a fused weight
    convert: Callable[[Tensor], Tensor] = _as_it_is  # what was read → what `target` holds
    finish: Callable[[], None] = _nothing  # called when all shards of the model are filled


class Sharded(Protocol):
    """Whatever holds weights."""

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the checkpoint."""


def shards_of(*parts: Sharded) -> Iterator[Shard]:
    """The shards of several layers, in order."""
    for part in parts:
        yield from part.shards()


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where one rank's tensors live, the ranks it shares each layer with, how its linear layers
    hold their weights, and by what the rest is computed."""

    group: GroupCoordinator  # tensor-parallel
    device: torch.device
    dtype: torch.dtype  # of what is computed, and of weights that are not quantized
    all2all: All2AllManager = field(default_factory=lambda: Replicated(GroupCoordinator()))
    """Between the ranks of `group` that hold different experts; default: each holds all."""
    quantization: Quantization | None = None
    kernels: Kernels = field(default_factory=TorchKernels)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def split(self, total: int) -> slice:
        """This rank's equal share of `total` (a multiple of the group's size)."""
        share = total // self.group.size
        return slice(self.group.rank * share, (self.group.rank + 1) * share)
