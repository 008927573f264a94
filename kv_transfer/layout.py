"""Who owns which part of the KV cache, and which part must go where.

A rank owns a rectangle: a range of layers × a range of KV heads. What a source rank must
send to a sink rank is the intersection of their rectangles; that one piece of arithmetic
covers unequal tensor parallelism, unequal pipelines and replicated KV heads, in both
directions.

Inside a rank the cache is one tensor, head-major inside a block, so that a slice of heads
of one block is contiguous:

    [layer][k|v][block, kv_head, slot, head_dim]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.core.errors import TransferError

if TYPE_CHECKING:
    import torch

WIRE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Rect:
    """Layers `layer_start…layer_end-1` × KV heads `head_start…head_end-1` of the model."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def area(self) -> int:
        return max(0, self.layer_end - self.layer_start) * max(0, self.head_end - self.head_start)

    def intersect(self, other: Rect) -> Rect:
        """The common part; its area is 0 when there is none."""
        return Rect(
            max(self.layer_start, other.layer_start),
            min(self.layer_end, other.layer_end),
            max(self.head_start, other.head_start),
            min(self.head_end, other.head_end),
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What one source rank sends to one sink rank, for every block of a transfer."""

    source_rank: int
    sink_rank: int
    rect: Rect


@dataclass(frozen=True, slots=True)
class CacheView:
    """One rank's cache and the rectangle it covers.

    `cache` has shape `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`.
    `shared_fd` is the memory file behind a CPU cache (memfd), for connectors that map it.
    """

    cache: torch.Tensor
    rect: Rect
    shared_fd: int | None = None
    shared_offset: int = 0  # of the tensor's first byte in the file


def plan(sources: Sequence[Rect], sinks: Sequence[Rect]) -> list[Piece]:
    """Which source rank sends what to which sink rank, so that every sink's rectangle is
    covered exactly once. Where several sources hold the same part (replicated KV heads), the
    senders are spread over the sinks.

    Raises:
        TransferError: LAYOUT_MISMATCH, a part of a sink's rectangle is held by no source.
    """
    raise NotImplementedError


def fingerprint(parts: Mapping[str, str]) -> str:
    """One short hash of everything that must be equal on both sides: model, weights revision,
    dtype, block size, layout and wire version."""
    text = "\n".join(f"{key}={parts[key]}" for key in sorted(parts))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def explain_mismatch(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Which parts differ and how, for a log line; '' when none do."""
    keys = sorted({*ours, *theirs})
    return "; ".join(
        f"{key}: {ours.get(key)} ≠ {theirs.get(key)}"
        for key in keys
        if ours.get(key) != theirs.get(key)
    )


__all__ = ["CacheView", "Piece", "Rect", "TransferError", "explain_mismatch", "fingerprint", "plan"]
