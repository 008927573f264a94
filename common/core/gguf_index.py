"""The index of a GGUF file's tensors, beside the link to the file in a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

INDEX_FILE = "gguf.json"
LINK = "model.gguf"

# Supported ggml type → (weights, bytes) of a block of consecutive weights that share scales.
_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
PACKED_BITS = {"Q8_0": 8, "Q4_0": 4}
"""Types that stay packed in memory → bits per weight; 32 weights share a scale."""


def block_of(kind: str) -> tuple[int, int] | None:
    """Returns (weights, bytes) of a block of the ggml type; None if it is not supported."""
    return _BLOCKS.get(kind)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The place and storage format of a tensor in the file."""

    kind: str  # ggml's name of the type
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    paired_heads: int | None = None
    """The number of heads, if their rotary rows are interleaved (0, D/2, 1, D/2 + 1, …)."""
    packed: bool = False  # whether it stays packed in memory

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        weights, size = _BLOCKS[self.kind]
        return self.numbers // weights * size

    def as_json(self) -> list[Any]:
        return [self.kind, list(self.shape), self.offset, self.paired_heads, self.packed]

    @classmethod
    def from_json(cls, fields: list[Any]) -> IndexEntry:
        kind, shape, offset, heads, packed = fields
        return cls(kind, tuple(shape), offset, heads, packed)


def read_index(content: Mapping[str, list[Any]]) -> dict[str, IndexEntry]:
    """Returns the entries of the parsed file by tensor name."""
    return {name: IndexEntry.from_json(fields) for name, fields in content.items()}
