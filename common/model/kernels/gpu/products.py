"""Products with quantized matrices, whose numbers are read once and converted in registers.

A program multiplies ROWS rows of the matrix by a tile of tokens. It sums exact products of the
tokens with the numbers less their zero points, in float32, and multiplies the sums by the group's
scale, so weights are not rounded to the dtype. Few tokens leave too few programs to read memory
at full speed. Then several programs share the inputs of a tile, as in split-K and Stream-K
products (arXiv:2301.03598, section 2), and their float32 sums are added in a fixed order.

Decoding is bound by memory: with MOST_TOKENS or fewer, reading 0.5 to 1 byte per weight is the
larger part. With more, dequantizing is cheaper than converting the matrix again for every tile of
tokens. By bytes and operations of an H100 (3.35 TB/s; 989 TFLOP/s, of which torch's products may
reach 70 % and these perhaps 40 %), per weight and with T tokens:

    here           the larger of 1 byte: 0.3 ps, and 2 T operations: 0.005 T ps
    dequantized    5 bytes (int8) to 12 bytes (4 bits): 1.5 to 3.7 ps, plus 0.003 T ps

Both take as long at T = 700 or more. MOST_TOKENS is lower because nothing was measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.kernels.quantized import Quantized

MOST_TOKENS = 256
ROWS = 64  # rows of the matrix in a program
TOKENS = (16, 32, 64, 128)  # tokens of a program; the least that tensor cores take is 16
MOST_SPLIT = 64  # tokens up to which programs share inputs
PROGRAMS = 256  # about two for each multiprocessor of an H100
MIN_STEPS = 4  # steps over the inputs of each program that shares them
FLOAT32_TOKENS = 16  # float32 has no tensor cores: small tiles, which fit in registers
# Bytes of a row in a step by (two numbers in a byte, tokens): what fits in registers.
_MAX_STEP = {(False, 16): 128, (False, 32): 128, (False, 64): 64, (False, 128): 64}
_MAX_STEP |= {(True, 16): 64, (True, 32): 64, (True, 64): 64, (True, 128): 32}
BLOCK = 1024  # numbers of a program that adds sums


class GpuProducts:
    """The kernels as `Products`."""

    token_counts: tuple[int, ...] = TOKENS

    def takes(self, matrix: Quantized) -> bool:
        return _step(matrix) is not None

    def linear(self, x: Tensor, matrix: Quantized, bias: Tensor | None) -> Tensor | None:
        if len(x) > MOST_TOKENS:
            return None
        return product(x, matrix, bias)


def product(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """Returns `[T, out]` of `x` `[T, in]`, in the dtype of `x`: float32, bfloat16 or float16. A
    token's result depends on the number of tokens, rounded up to one of TOKENS, but not on the
    other tokens."""
    x = _aligned(x)
    (tokens, inputs), (groups, rows) = x.shape, matrix.scales.shape
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    tile = next((size for size in TOKENS if tokens <= size), TOKENS[-1])
    tile = min(tile, FLOAT32_TOKENS) if x.dtype == torch.float32 else tile
    step = _step(matrix)
    assert step is not None, "`takes` says which matrices can be multiplied"
    step = min(step, _MAX_STEP[matrix.format == "nibbles", tile])
    steps = triton.cdiv(matrix.values.shape[1], step)
    parts = _parts(rows, steps) if tokens <= MOST_SPLIT else 1
    sums = out
    if parts > 1:
        sums = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x.device)
    launch(
        _product, (triton.cdiv(tokens, tile), triton.cdiv(rows, ROWS), parts),
        x, matrix.values, matrix.scales, matrix.zeros, bias if parts == 1 else None, sums,
        tokens, rows, inputs, x.stride(0) if tokens > 1 else inputs, matrix.first,
        triton.cdiv(steps, parts), FORMAT=matrix.format, ZERO=matrix.zero,
        SIZE=matrix.size if groups > 1 else None, TOKENS=tile, ROWS=ROWS, STEP=step,
        num_warps=8 if tile > 64 else 4, num_stages=4,
    )  # fmt: skip
    if parts > 1:
        programs = (triton.cdiv(out.numel(), BLOCK),)
        launch(_add, programs, sums, bias, out, out.numel(), rows, PARTS=parts, BLOCK=BLOCK)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Returns `x`, or a copy, with its rows one after another or at multiples of 16 numbers, and
    its first number at a multiple of 16 bytes: one compiled kernel for all."""
    right = x.is_contiguous() or (x.stride(1) == 1 and x.stride(0) % 16 == 0)
    if right and x.storage_offset() * x.itemsize % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _step(matrix: Quantized) -> int | None:
    """Returns how many bytes of a row a program may read in a step, which is within one group."""
    stored = matrix.values.shape[1]
    if len(matrix.scales) == 1:
        return 128
    cuts = [matrix.size, matrix.first] + [stored] * (matrix.format == "nibbles")
    return next((step for step in (128, 64, 32, 16) if not any(n % step for n in cuts)), None)


def _parts(rows: int, steps: int) -> int:
    """Returns how many programs share the inputs of a tile, whatever the tokens."""
    parts = 1
    while triton.cdiv(rows, ROWS) * parts < PROGRAMS and steps >= 2 * parts * MIN_STEPS:
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x, values, scales, zeros, bias, out, tokens, rows, inputs, stride, first, steps,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 if FORMAT == "nibbles" else 1
    stored = inputs // HALVES
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_token, has_row = token < tokens, row < rows
    matrix = values + row.to(tl.int64)[:, None] * stored
    inputs_of = x + token.to(tl.int64)[None, :] * stride
    begin = tl.program_id(2) * steps
    total = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    for number in range(begin, min(begin + steps, (stored + STEP - 1) // STEP)):
        place = number * STEP + tl.arange(0, STEP)
        inside = place < stored
        numbers = tl.load(matrix + place[None, :], has_row[:, None] & inside[None, :], 0)
        for half in tl.static_range(HALVES):
            of_token = inputs_of + half * stored + place[:, None]
            tile = tl.load(of_token, inside[:, None] & has_token[None, :], 0.0)
            of_group = row
            if SIZE is not None:
                of_group += (number * STEP + half * stored + first) // SIZE * rows
            if zeros is None:
                zero = tl.full((ROWS,), ZERO, tl.int32)
            else:
                zero = tl.load(zeros + of_group, has_row, 0).to(tl.int32) + ZERO
            weights = _weights(numbers, zero, FORMAT, half, tile.dtype)
            if SIZE is not None:
                scale = tl.load(scales + of_group, has_row, 0.0).to(tl.float32)
                total += tl.dot(weights, tile, input_precision="ieee") * scale[:, None]
            else:
                total = tl.dot(weights, tile, total, input_precision="ieee")
    if SIZE is None:
        total *= tl.load(scales + row, has_row, 0.0).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + row, has_row, 0.0).to(tl.float32)[:, None]
    place = (tl.program_id(2) * tokens + token).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), has_row[:, None] & has_token[None, :])


@triton.jit
def _weights(numbers, zero, FORMAT: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """Returns `number - zero` in `dtype`, which has all of these integers."""
    if FORMAT == "int8":
        return numbers.to(dtype)
    numbers = numbers.to(tl.int32)
    if FORMAT == "nibbles":
        numbers = (numbers & 15) if HALF == 0 else (numbers >> 4)
    # An integer n below 2^23 in the last bits of 2^23 is the float32 2^23 + n: no conversions.
    shifted = (numbers | 0x4B000000).to(tl.float32, bitcast=True)
    return (shifted - (zero + 0x800000).to(tl.float32)[:, None]).to(dtype)


@triton.jit(do_not_specialize=["count"])
def _add(sums, bias, out, count, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * count.to(tl.int64) + place, inside, 0.0)
    if bias is not None:
        total += tl.load(bias + place % rows, inside, 0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)
