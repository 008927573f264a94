"""Matrices of linear layers as `linear.cpp` multiplies them: packed in their place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 32  # what a packed matrix's rows are a multiple of: two of the widest vectors
MAX_INT8_INPUTS = 1 << 16  # beyond which sums of products might leave 32 bits
FLIPPED = 0x80808080  # packed int8 are stored with 128 added to each
AMX_TOKENS = 16  # beyond which a CPU with AMX multiplies faster by it

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Packer:
    """Packs matrices and multiplies by them.

    A packed matrix is a tensor of the old shape, dtype and memory in another order: float32 and
    bfloat16 as the tokens are, or int8. The result is in the dtype of the tokens; sums are in
    float32, or with int8 and bfloat16 in integers, for which each token is rounded to 16 bits. It
    depends on nothing but the token and the matrix.
    """

    def __init__(self, function: Callable[[str], Callable[..., None]], amx: bool) -> None:
        """`function` finds one in the library by its name. `amx`: this CPU multiplies bfloat16 in
        tiles, of which torch makes use."""
        self._linear = function("linear")
        self._pack = function("pack_rows")
        self._unpack = function("unpack_rows")
        self._amx = amx

    def takes(self, matrix: Tensor) -> bool:
        """Whether `matrix` `[..., out, in]` can be packed, and multiplied faster for it."""
        if not matrix.is_contiguous() or matrix.device.type != "cpu":
            return False
        rows, inputs = matrix.shape[-2:]
        if matrix.dtype == torch.int8:
            right = inputs <= MAX_INT8_INPUTS
        else:
            right = matrix.dtype in _DTYPES and not (self._amx and matrix.dtype == torch.bfloat16)
        return right and rows % ROWS == 0 and inputs * matrix.itemsize % 4 == 0

    def pack(self, matrix: Tensor) -> None:
        """In its place."""
        words = _words(matrix)
        rows = matrix.numel() // matrix.shape[-1]
        self._pack(0, torch.get_num_threads(), rows, words, _flip(matrix), matrix.data_ptr())

    def unpack(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of a packed `[out, in]` as they were; all, or those of int64 `rows`.

        Raises:
            IndexError: there is no such row.
        """
        if rows is None:
            rows = torch.arange(len(matrix))
        elif len(rows) and not 0 <= (bounds := torch.aminmax(rows)).min <= bounds.max < len(matrix):
            raise IndexError(f"rows {rows.tolist()} of a matrix of {len(matrix)}")
        out = matrix.new_empty(len(rows), matrix.shape[1])
        self._unpack(
            0, torch.get_num_threads(), len(rows), _words(matrix), _flip(matrix),
            rows.contiguous().data_ptr(), matrix.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def linear(
        self,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x` `[T, in]` times a packed `[out, in]`: `[T, out]`, contiguous. With int8 there are
        `scales` `[out]`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), len(matrix)) if out is None else out
        self._linear(
            _DTYPES[x.dtype], torch.get_num_threads(), len(x), *matrix.shape, x.data_ptr(),
            x.stride(0), matrix.data_ptr(), None if scales is None else scales.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def wins(self, tokens: int, dtype: torch.dtype) -> bool:
        """Whether int8 is multiplied as it is faster than in the dtype."""
        return dtype in _DTYPES and not (
            self._amx and dtype == torch.bfloat16 and tokens > AMX_TOKENS
        )


def _words(matrix: Tensor) -> int:
    """Of four bytes, in a row."""
    return matrix.shape[-1] * matrix.itemsize // 4


def _flip(matrix: Tensor) -> int:
    return FLIPPED if matrix.dtype == torch.int8 else 0
