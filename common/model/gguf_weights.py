"""Reads a GGUF file's tensors like those of a checkpoint.

Most are dequantized to float32. Those that stay packed in memory have the format of
pack-quantized checkpoints (compressed-tensors): X.weight_packed and X.weight_scale for X.weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.gguf_index import (
    INDEX_FILE,
    LINK,
    PACKED_BITS,
    IndexEntry,
    block_of,
    read_index,
)
from pdserve.common.model.sharding import ranges

Bytes = NDArray[np.uint8]

_SCALE_BYTES = 2  # float16 scale of a packed type's block
_SIGN = 0x80


def is_gguf_folder(folder: Path) -> bool:
    return (folder / INDEX_FILE).is_file()


def open_gguf(folder: Path) -> dict[str, Any]:
    """Returns tensor name → lazy tensor; the file stays mapped while they live.

    Raises:
        ConfigError: the package gguf is not installed, or the file is gone or too short.
    """
    if find_spec("gguf") is None:
        raise ConfigError("GGUF weights need the package gguf: pip install 'pdserve[gguf]'")
    index, data = read_folder(folder)
    view: dict[str, Any] = {}
    for name, entry in index.items():
        blocks = _Blocks(data, entry)
        if entry.packed:
            view[f"{name}_packed"] = _Numbers(blocks, PACKED_BITS[entry.kind])
            view[f"{name}_scale"] = _Scales(blocks)
        else:
            view[name] = _Dequantized(blocks)
    return view


def read_folder(folder: Path) -> tuple[dict[str, IndexEntry], Bytes]:
    """Returns the index and the mapped file. Raises ConfigError like `open_gguf`."""
    index = read_index(json.loads((folder / INDEX_FILE).read_bytes()))
    file = (folder / LINK).resolve()
    try:
        data = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if len(data) < max(entry.offset + entry.nbytes for entry in index.values()):
        raise ConfigError(f"{file} has changed since {folder} was made: start again")
    return index, data


class _Blocks:
    """The bytes of a tensor: `[rows, blocks per row, bytes per block]`; of a vector each number is
    a row."""

    def __init__(self, data: Bytes, entry: IndexEntry) -> None:
        self.kind, self.shape = entry.kind, entry.shape
        self.weights, size = block_of(entry.kind) or (1, 1)
        rows = entry.shape[0]
        flat = data[entry.offset : entry.offset + entry.nbytes]
        self._bytes = flat.reshape(rows, -1, size)
        self._order = None if entry.paired_heads is None else _halves(rows, entry.paired_heads)

    def read(self, rows: tuple[int, int], blocks: tuple[int, int]) -> Bytes:
        """Reads `[rows, blocks, bytes per block]`, with rows in a checkpoint's order."""
        chosen: Any = slice(*rows) if self._order is None else self._order[slice(*rows)]
        return np.array(self._bytes[chosen, slice(*blocks)])


def _halves(rows: int, heads: int) -> NDArray[np.intp]:
    """Returns each row's index in the file. A checkpoint rotates a row of a head's first half with
    one of its second half; the file stores such a pair of rows next to each other."""
    pairs = np.arange(rows).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _covering(start: int, end: int, size: int) -> tuple[int, int]:
    """Returns the range of blocks of `size` that has `start … end-1`."""
    return start // size, -(-end // size)


class _Dequantized:
    """A tensor that reads as float32."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks

    def get_shape(self) -> list[int]:
        return list(self._blocks.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        blocks, shape = self._blocks, self._blocks.shape
        rows, columns = (*ranges(index, shape), (0, 1))[:2]
        first, last = _covering(*columns, blocks.weights)
        values = _dequantize(blocks.read(rows, (first, last)), blocks.kind)
        start = columns[0] - first * blocks.weights
        part = values[:, start : start + columns[1] - columns[0]]
        return torch.from_numpy(np.ascontiguousarray(part)).flatten(len(shape) - 1)


def _dequantize(data: Bytes, kind: str) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType, dequantize

    rows = data.reshape(len(data), -1)
    return np.asarray(dequantize(rows, GGMLQuantizationType[kind]), np.float32)


class _Numbers:
    """int32 `[out, in / (32 / bits)]` of unsigned values, the first in a word's lowest bits."""

    def __init__(self, blocks: _Blocks, bits: int) -> None:
        self._blocks, self._bits = blocks, bits
        self._words = blocks.weights * bits // 32  # per block

    def get_shape(self) -> list[int]:
        rows, columns = self._blocks.shape
        return [rows, columns // self._blocks.weights * self._words]

    def get_dtype(self) -> str:
        return "I32"

    def __getitem__(self, index: Any) -> Tensor:
        rows, words = ranges(index, self.get_shape())
        first, last = _covering(*words, self._words)
        stored = self._blocks.read(rows, (first, last))[:, :, _SCALE_BYTES:]
        in_order = stored ^ _SIGN if self._bits == 8 else _neighbours(stored)
        whole = np.ascontiguousarray(in_order).view(np.int32).reshape(len(stored), -1)
        start = words[0] - first * self._words
        return torch.from_numpy(whole[:, start : start + words[1] - words[0]].copy())


def _neighbours(halves: Bytes) -> Bytes:
    """Returns bytes with two consecutive values each, from bytes that have a value of a block's
    first half in the low bits and one of its second half in the high bits."""
    numbers = np.concatenate((halves & 15, halves >> 4), axis=-1)
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


class _Scales:
    """float16 `[out, in / 32]`."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks

    def get_shape(self) -> list[int]:
        rows, columns = self._blocks.shape
        return [rows, columns // self._blocks.weights]

    def get_dtype(self) -> str:
        return "F16"

    def __getitem__(self, index: Any) -> Tensor:
        rows, groups = ranges(index, self.get_shape())
        stored = self._blocks.read(rows, groups)[:, :, :_SCALE_BYTES]
        return torch.from_numpy(np.ascontiguousarray(stored).view(np.float16)[..., 0].copy())


# ---- the revision ----


def revision_parts(folder: Path, page: int) -> Iterator[bytes]:
    """Yields the bytes that identify the weights: the index, and a page of every tensor."""
    index, data = read_folder(folder)
    yield (folder / INDEX_FILE).read_bytes()
    for entry in index.values():
        yield data[entry.offset : entry.offset + min(page, entry.nbytes)].tobytes()
