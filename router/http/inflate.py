"""Compressed bodies, inflated step by step: a megabyte of gzip may hold a gigabyte."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from pdserve.common.core.errors import InvalidRequest

IDENTITY = frozenset({"", "identity"})
COMPRESSED = frozenset({"gzip", "deflate"})
STEP = 64 * 1024  # bytes that one step inflates to, at most: a fraction of a millisecond
MAX_MEMBERS = 1024  # of one gzip body; each costs a step, however small it is
_INPUT = 16 * 1024  # compressed bytes at a time: each step copies what is left of them
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


class Inflater:
    """One body. `deflate` is zlib's format or, as some clients send it, the bare stream; gzip may
    have several members, one after another. Nothing else may follow."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None  # zlib's; None before the first byte and between members
        self._members = 0

    def steps(self, data: bytes) -> Iterator[bytes]:
        """The next compressed bytes as pieces of up to STEP bytes, some of them empty. A piece is
        inflated when it is asked for.

        Raises:
            InvalidRequest: they are broken.
        """
        for start in range(0, len(data), _INPUT):
            yield from self._inflate(data[start : start + _INPUT])

    def end(self) -> None:
        """Raises InvalidRequest: the stream is cut off."""
        if self._stream is not None:
            raise self._error("it ends too early")

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        is_more = bool(data)
        while is_more:
            stream = self._stream = self._stream or self._begin(data)
            try:
                piece = stream.decompress(data, STEP)
            except zlib.error:
                raise self._error("it is broken") from None
            yield piece
            # Of input that is used up, output may be left.
            data = stream.unconsumed_tail
            is_more = bool(data) or len(piece) == STEP
            if stream.eof:
                data, self._stream = stream.unused_data, None
                is_more = bool(data)

    def _begin(self, data: bytes) -> Any:
        self._members += 1
        if self._members > (MAX_MEMBERS if self._encoding == "gzip" else 1):
            raise self._error("too much follows its end")
        if self._encoding == "gzip":
            return zlib.decompressobj(_GZIP)
        return zlib.decompressobj(_ZLIB if data[0] & 0xF == 8 else _RAW)  # RFC 1950: its method

    def _error(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the body cannot be read as {self._encoding}: {what}")
