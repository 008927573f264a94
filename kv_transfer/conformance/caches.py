"""Small KV caches in memory files, and checks of their content."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from pdserve.kv_transfer.layout import CacheView, Rect

FREE = -7.0  # the content of blocks that must not be written


@dataclass(frozen=True)
class Geometry:
    """Describes the cache of a whole model; float32."""

    layers: int = 4
    heads: int = 4
    block_size: int = 4
    head_dim: int = 8
    num_blocks: int = 256
    planes: int = 2

    def shape(self, rect: Rect) -> tuple[int, ...]:
        sizes = rect.num_layers, self.planes, self.num_blocks, rect.num_heads
        return (*sizes, self.block_size, self.head_dim)

    @property
    def rect(self) -> Rect:
        """Returns the rectangle of the whole model."""
        return Rect(0, self.layers, 0, self.heads)


ONE_PLANE = {
    "latents": Geometry(heads=1, head_dim=40, planes=1),
    "states": Geometry(head_dim=96, block_size=1, planes=1),
}
"""Latents without heads, and recurrent states: a plane instead of keys and values."""


class MemoryCache:
    """Puts one rank's cache into a memory file, so that one-sided connectors can map it."""

    def __init__(self, geometry: Geometry, rect: Rect, fd: int | None = None) -> None:
        """Takes ownership of `fd`, an existing file of another process; None makes a new file."""
        self.geometry = geometry
        self.rect = rect
        self.fd = os.memfd_create("kv-conformance", os.MFD_ALLOW_SEALING) if fd is None else fd
        shape = geometry.shape(rect)
        nbytes = 4 * torch.Size(shape).numel()
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.float32).view(shape)

    @cached_property
    def view(self) -> CacheView:
        return CacheView(self.tensor, self.rect, self.fd)

    @property
    def path(self) -> str:
        """Returns the path at which a process of the same user can open the file."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rectangle of a whole model's cache."""
        layers, heads = self.rect.slices_in(self.geometry.rect)
        return whole[layers, :, :, heads]

    def blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Returns a copy of some blocks, in the order of the ids."""
        return self.tensor[:, :, list(block_ids)]

    def others_untouched(self, block_ids: Sequence[int]) -> bool:
        """Returns whether all other blocks hold FREE."""
        mask = torch.ones(self.geometry.num_blocks, dtype=torch.bool)
        mask[list(block_ids)] = False
        return bool((self.tensor[:, :, mask] == FREE).all())

    def close(self) -> None:
        os.close(self.fd)
