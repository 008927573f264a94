"""Packs matrices of linear layers in place, in the order in which `linear.cpp` and `grouped.cpp`
read them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

ROWS = 32  # rows of a packed matrix are a multiple of this: two of the widest vectors
MAX_BLOCKS = 8  # blocks in which inputs are summed: `block_sums.h`
MAX_INT8_INPUTS = 1 << 16  # above this, sums of products could exceed 32 bits
FLIPPED = 0x80808080  # packed int8 values are stored with 128 added

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Grouped(Structure):
    """A packed matrix with groups of inputs: `Grouped` in `grouped.cpp`. Its pointers are to
    tensors that the caller keeps alive."""

    _fields_ = (
        ("bits", c_int64),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("block", c_int64),
        ("run", c_int64),
        ("groups", c_int64),
        ("words", c_void_p),
        ("order", c_void_p),
        ("groups_of_runs", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("zero", c_double),
    )


class Packed(Structure):
    """A linear layer's packed matrix `[rows, inputs]` with its bias: `Packed` in `layers.cpp`. It
    has `words`, for int8 with `scales`, or else is `grouped`, the address of a `Grouped`. Its
    pointers are to memory that the caller keeps alive."""

    _fields_ = (
        ("rows", c_int64),
        ("inputs", c_int64),
        ("block", c_int64),
        ("words", c_void_p),
        ("scales", c_void_p),
        ("grouped", c_void_p),
        ("bias", c_void_p),
    )


class Packer:
    """Packs matrices and multiplies by them.

    A packed matrix keeps its shape, dtype and memory but has another order: float32 or bfloat16
    like the tokens, or int8. The result has the tokens' dtype. Sums are in float32; for int8 with
    bfloat16 they are in integers, with each token rounded to 16 bits. A token's result does not
    depend on other tokens. Inputs may be summed in blocks, whose number is a power of two: if each
    rank has some of the blocks and their sums are added as a tree, the result is bit-identical to
    that of one rank.
    """

    def __init__(self, function: Callable[[str], Callable[..., None]]) -> None:
        """`function`: looks up a library function."""
        self._linear = function("linear")
        self._pack = function("pack_rows")
        self._unpack = function("unpack_rows")
        self._grouped_linear = function("grouped_linear")
        self._pack_grouped = function("pack_grouped")
        self._unpack_grouped = function("unpack_grouped")

    def takes(self, matrix: Tensor) -> bool:
        """Returns whether `matrix` `[..., out, in]` can be packed and is then faster."""
        if not matrix.is_contiguous() or matrix.device.type != "cpu":
            return False
        rows, inputs = matrix.shape[-2:]
        small = matrix.dtype == torch.int8 and inputs <= MAX_INT8_INPUTS
        right = small or matrix.dtype in _DTYPES
        return right and rows % ROWS == 0 and inputs * matrix.itemsize % 4 == 0

    def padded(self, matrix: Tensor) -> Tensor:
        """Returns zeros with the matrix's rows plus the padding rows that packing needs; the matrix
        itself if it needs none, or cannot be packed."""
        rows = -(-len(matrix) // ROWS) * ROWS
        if rows == len(matrix):
            return matrix
        padded = matrix.new_zeros(rows, matrix.shape[1])
        return padded if self.takes(padded) else matrix

    def pack(self, matrix: Tensor) -> None:
        """Packs the matrix in place."""
        words = _words(matrix)
        rows = matrix.numel() // matrix.shape[-1]
        self._pack(0, torch.get_num_threads(), rows, words, _flip(matrix), matrix.data_ptr())

    def unpack(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns rows of a packed `[out, in]` in the original order: all, or int64 `rows`.

        Raises:
            IndexError: a row does not exist.
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
        block: int | None = None,
        partial: bool = False,
    ) -> Tensor:
        """Multiplies `x` `[T, in]` by a packed `[out, in]`; returns contiguous `[T, out]`. int8
        needs `scales` `[out]`.

        Args:
            block: inputs of a block, whole words (default: all).
            partial: returns float32 sums, without the bias, to be added to those of other ranks.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        if out is None:
            out = x.new_empty(len(x), len(matrix), dtype=torch.float32 if partial else x.dtype)
        self._linear(
            _DTYPES[x.dtype], torch.get_num_threads(), len(x), *matrix.shape,
            block or matrix.shape[1], x.data_ptr(), x.stride(0), matrix.data_ptr(),
            pointer(scales), pointer(bias), partial, out.data_ptr(),
        )  # fmt: skip
        return out

    def pack_grouped(self, numbers: Tensor, bits: int, order: Tensor | None) -> None:
        """Packs uint8 `[out, bytes]` in place, with inputs in int32 `order`. 4-bit numbers are as
        `pack_nibbles` leaves them; rows are a multiple of ROWS."""
        rows, inputs = len(numbers), numbers.shape[1] * 8 // bits
        self._pack_grouped(
            0, torch.get_num_threads(), rows, inputs, bits, pointer(order), numbers.data_ptr()
        )

    def unpack_grouped(self, numbers: Tensor, bits: int, order: Tensor | None) -> Tensor:
        """Reverses `pack_grouped`."""
        rows, inputs, out = len(numbers), numbers.shape[1] * 8 // bits, torch.empty_like(numbers)
        self._unpack_grouped(
            0, torch.get_num_threads(), rows, inputs, bits, pointer(order), numbers.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def grouped_linear(
        self, x: Tensor, matrix: Grouped, bias: Tensor | None, partial: bool = False
    ) -> Tensor:
        """Multiplies `x` `[T, in]` by a packed matrix with groups of inputs; returns `[T, out]`;
        `partial`: as in `linear`. In bfloat16 each token's inputs of a run are quantized: to 8 bits
        for 4-bit weights, to 16 bits for 8-bit weights."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), matrix.rows, dtype=torch.float32 if partial else x.dtype)
        self._grouped_linear(
            _DTYPES[x.dtype], torch.get_num_threads(), len(x), x.data_ptr(), x.stride(0),
            byref(matrix), pointer(bias), partial, out.data_ptr(),
        )  # fmt: skip
        return out

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Returns whether the kernels multiply tokens of this dtype."""
        return dtype in _DTYPES


def _words(matrix: Tensor) -> int:
    """Returns the 32-bit words per row."""
    return matrix.shape[-1] * matrix.itemsize // 4


def _flip(matrix: Tensor) -> int:
    return FLIPPED if matrix.dtype == torch.int8 else 0


def pointer(tensor: Tensor | None) -> int | None:
    """Returns the address of the numbers; None, a null pointer, without a tensor."""
    return None if tensor is None else tensor.data_ptr()
