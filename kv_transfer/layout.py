"""The parts of the KV cache: which rank owns which, and which source sends which to which sink.

A rank owns a rectangle of each KV group (`common/core/kv_groups.py`): a range of the group's
layers × a range of KV heads. A source rank sends a sink rank the intersection of their rectangles.
That one piece of arithmetic covers unequal tensor parallelism, unequal pipelines and replicated KV
heads, in both directions. Groups never mix: each has a cache, block ids and connectors of its own.

Inside a rank a group's cache is one tensor, head-major inside a block, so that a slice of heads of
one block is contiguous; a plane has the keys, the values or the latents of a layer:

    [layer][plane][block, kv_head, slot, head_dim]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from pdserve.common.core.errors import Blame, ConfigError, TransferError

if TYPE_CHECKING:
    import torch

WIRE_VERSION = 5


class Part(Protocol):
    """Names a part of a model's KV: a rank's cache shape or an endpoint's message has one."""

    @property
    def layer_start(self) -> int: ...
    @property
    def layer_end(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def head_end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rect:
    """Covers layers `layer_start…layer_end-1` × KV heads `head_start…head_end-1` of a KV group."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @classmethod
    def of(cls, part: Part) -> Rect:
        return cls(part.layer_start, part.layer_end, part.head_start, part.head_end)

    @property
    def corners(self) -> tuple[int, int, int, int]:
        return self.layer_start, self.layer_end, self.head_start, self.head_end

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_end - self.head_start

    @property
    def area(self) -> int:
        return max(0, self.num_layers) * max(0, self.num_heads)

    def contains(self, part: Rect) -> bool:
        """Returns whether `part` is not empty and lies within this rectangle."""
        return part.area > 0 and part.intersect(self) == part

    def slices_in(self, owner: Rect) -> tuple[slice, slice]:
        """Layers and heads as indices into the cache of a rank that owns `owner`."""
        return (
            slice(self.layer_start - owner.layer_start, self.layer_end - owner.layer_start),
            slice(self.head_start - owner.head_start, self.head_end - owner.head_start),
        )

    def split_layers(self, parts: int) -> list[Rect]:
        """Cuts it into at most `parts` rectangles of equal height, give or take a layer."""
        parts = max(1, min(parts, self.num_layers))
        edges = [self.layer_start + self.num_layers * part // parts for part in range(parts + 1)]
        return [replace(self, layer_start=a, layer_end=b) for a, b in pairwise(edges)]

    def intersect(self, other: Rect) -> Rect:
        """Returns the common part; its area is 0 when there is none."""
        return Rect(
            max(self.layer_start, other.layer_start),
            min(self.layer_end, other.layer_end),
            max(self.head_start, other.head_start),
            min(self.head_end, other.head_end),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """Names one rank's part of one KV group. A node numbers its shares: with one group the numbers
    are the ranks'."""

    rank: int
    rect: Rect
    group: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Says which part of a source's share goes to which sink's share, for every block of a
    transfer. Shares are given by their numbers."""

    source: int
    sink: int
    rect: Rect


@dataclass(frozen=True, slots=True)
class CacheView:
    """Holds one rank's cache of one KV group and the rectangle it covers.

    `cache` has shape `[num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim]`.
    `shared_fd` is the memory file behind a CPU cache (memfd), for connectors that map it.
    """

    cache: torch.Tensor
    rect: Rect
    shared_fd: int | None = None
    shared_offset: int = 0  # of the tensor's first byte in the file


def rank_rects(num_layers: int, num_kv_heads: int, tp_size: int) -> list[Rect]:
    """Returns the rectangle of each tensor-parallel rank. With more ranks than KV heads every head
    is replicated over `tp_size / num_kv_heads` neighbouring ranks (Megatron-LM's rule for
    grouped-query attention).

    Raises:
        ConfigError: neither of KV heads and ranks divides the other.
    """
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks; choose a "
            "--tensor-parallel-size that divides the heads or is a multiple of them"
        )
    width = max(1, num_kv_heads // tp_size)
    starts = (rank * num_kv_heads // tp_size for rank in range(tp_size))
    return [Rect(0, num_layers, start, start + width) for start in starts]


def plan(sources: Sequence[Share], sinks: Sequence[Share]) -> list[Piece]:
    """Plans which source sends which part to which sink, so that every sink's share is covered
    exactly once. Where several sources hold the same part (replicated KV heads), the senders are
    spread over the sinks.

    Raises:
        TransferError: LAYOUT_MISMATCH, a part of a sink's share is held by no source.
    """
    load = [0] * len(sources)  # area each source sends so far
    pieces: list[Piece] = []
    for number, sink in enumerate(sinks):
        missing = [sink.rect]
        able = [i for i, source in enumerate(sources) if source.group == sink.group]
        for i in sorted(able, key=lambda i: (load[i], i)):
            held = sources[i].rect
            parts = [part for rect in missing if (part := rect.intersect(held)).area]
            missing = [rest for rect in missing for rest in _subtract(rect, held)]
            pieces += [Piece(i, number, part) for part in parts]
            load[i] += sum(part.area for part in parts)
        if missing:
            raise TransferError(
                f"no source rank holds {missing[0]} of KV group {sink.group}, which sink rank "
                f"{sink.rank} needs",
                code="LAYOUT_MISMATCH",
                retryable=False,
                blame=Blame.PREFILL,
            )
    return pieces


def _subtract(rect: Rect, hole: Rect) -> list[Rect]:
    """Returns `rect` without `hole`, as disjoint rectangles."""
    inner = rect.intersect(hole)
    if not inner.area:
        return [rect] if rect.area else []
    layers = inner.layer_start, inner.layer_end
    parts = (
        Rect(rect.layer_start, inner.layer_start, rect.head_start, rect.head_end),
        Rect(inner.layer_end, rect.layer_end, rect.head_start, rect.head_end),
        Rect(*layers, rect.head_start, inner.head_start),
        Rect(*layers, inner.head_end, rect.head_end),
    )
    return [part for part in parts if part.area]


def fingerprint(parts: Mapping[str, str]) -> str:
    """Returns a short hash of everything that must be equal on both sides: `parts` (weights, dtype,
    block size, layout) and the wire version."""
    lines = [f"wire={WIRE_VERSION}", *(f"{key}={parts[key]}" for key in sorted(parts))]
    text = "\n".join(lines)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def adapted(fingerprint: str, adapter: str) -> str:
    """Returns the fingerprint of KV that was computed with a LoRA adapter, named by its digest."""
    return f"{fingerprint}+{adapter}" if adapter else fingerprint
