"""Reads the header of a GGUF file: metadata, and the table of its tensors.

Each count and length is checked against the bytes that are left and against bounds before anything
is made of it. (The package `gguf` makes several objects of each value first.)

    "GGUF", version, number of tensors, number of keys
    a key: name, type, value             an array: type, number of values, values
    a tensor: name, dimensions, type, offset from the data's beginning
    the data, aligned
"""

from __future__ import annotations

import math
import mmap
from struct import Struct
from struct import error as StructError
from typing import Any

MAGIC = b"GGUF"
MAX_TEXT = 2**24  # bytes of one text
MAX_VALUES = 2**22  # of all arrays together; the largest vocabularies have a third
MAX_TEXTS = 2**27  # bytes of all texts together
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS = 2**16, 2**17, 4

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_FORMATS[12] = "d"

TensorRow = tuple[str, tuple[int, ...], int, int]
"""Name, shape in torch's order, number of the type, bytes from the beginning of the file."""


class Reader:
    """Reads on from a position in a mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)
        self._values = self._text_bytes = 0

    def header(self) -> tuple[dict[str, Any], list[TensorRow]]:
        """Raises ValueError: the file is damaged, or exceeds a bound."""
        try:
            return self._header()
        except StructError:
            raise ValueError("it ends early") from None

    def _header(self) -> tuple[dict[str, Any], list[TensorRow]]:
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported: 2 and 3, little-endian")
        tensors = self._count("tensors", MAX_TENSORS, 32)
        keys = self._count("keys", MAX_KEYS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            _add(metadata, self._text(), self._value(self._number("I")))
        rows = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError("general.alignment is no power of two")
        begin = -(-self._at // alignment) * alignment
        return metadata, [(*row[:3], begin + row[3]) for row in rows]

    def _number(self, format: str) -> Any:
        packed = Struct("<" + format)
        (value,) = packed.unpack_from(self._data, self._at)
        self._at += packed.size
        return value

    def _count(self, what: str, most: int, nbytes: int) -> int:
        """Reads a number of things, which take `nbytes` at least."""
        count: int = self._number("Q")
        if count > most:
            raise ValueError(f"it has {count} {what}; supported: up to {most}")
        if count * nbytes > len(self._data) - self._at:
            raise ValueError(f"it ends before its {count} {what}")
        return count

    def _text(self) -> str:
        length = self._count("bytes in a text", MAX_TEXT, 1)
        self._text_bytes += length
        if self._text_bytes > MAX_TEXTS:
            raise ValueError(f"its texts have more than {MAX_TEXTS} bytes")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"))
        return self._number(_format(kind))

    def _array(self, kind: int) -> list[Any]:
        if kind == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        size = 8 if kind == _TEXT else Struct(_format(kind)).size
        count = self._count("values in an array", MAX_VALUES - self._values, size)
        self._values += count
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        packed = Struct(f"<{count}{_format(kind)}")
        self._at += packed.size
        return list(packed.unpack_from(self._data, self._at - packed.size))

    def _tensor(self) -> TensorRow:
        name, dimensions = self._text(), self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"a value has the unknown type {kind}")
    return _FORMATS[kind]


def _add(metadata: dict[str, Any], key: str, value: Any) -> None:
    if key in metadata:
        raise ValueError(f"the key {key} is there twice")
    metadata[key] = value


def nbytes_of(shape: tuple[int, ...], block: int, size: int, left: int) -> int:
    """Returns the bytes of a tensor stored in blocks of `block` numbers and `size` bytes along the
    last dimension; `left` are in the file.

    Raises:
        ValueError: it does not fit the file or the blocks.
    """
    if not all(shape):
        raise ValueError("a dimension is 0")
    if shape and shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} do not divide into blocks of {block}")
    if (nbytes := math.prod(shape) // block * size) > left:
        raise ValueError("the file ends before it")
    return nbytes
