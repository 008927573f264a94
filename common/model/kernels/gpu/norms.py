"""RMS norms (arXiv:1910.07467), one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.model.kernels.gpu.launch import launch

MAX_BLOCK = 16384  # features that a program holds; it reads longer rows twice
FEATURES_PER_WARP = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of `x` `[..., size]`, contiguous, in the dtype of `x`: sums in float32, one
    rounding. `weight`: `[size]`. A view such as the query heads of `[T, heads, D]` is not
    copied."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _rows(x)
    _launch(rows, None, weight, None, out, eps)
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (`residual + x` `[T, size]`, its norm). The sum is rounded to the dtype before it is
    normed."""
    x = x.contiguous()
    # Apart, because the sum outlives its norm.
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(_rows(x), residual.contiguous(), weight, total, out, eps)
    return total, out


def _rows(x: Tensor) -> Tensor:
    """Returns `x` as `[outer, inner, size]` with contiguous rows."""
    while x.ndim > 2 and len(x) == 1:
        x = x[0]
    if x.ndim < 3:
        x = x.reshape(-1, 1, x.shape[-1])
    elif x.ndim > 3:
        x = x.flatten(0, -3)
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    outer, inner, size = rows.shape
    # The kernel multiplies the stride of a single row by 0. 0 stands for all strides there, so that
    # steps of one token run the same binary.
    strides = [
        stride if count > 1 else 0
        for count, stride in zip((outer, inner), rows.stride(), strict=False)
    ]
    block = min(triton.next_power_of_2(size), MAX_BLOCK)
    warps = min(max(block // FEATURES_PER_WARP, 1), 16)
    launch(
        _rms_norm, (outer * inner,), rows, residual, weight, total, out, eps, inner, *strides, size,
        BLOCK=block, WHOLE=size <= block, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(
    x, residual, weight, total, out, eps, inner, outer_stride, inner_stride, size,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row // inner * outer_stride + row % inner * inner_stride
    out += row * size
    if residual is not None:
        residual += row * size
        total += row * size
    squares = tl.zeros([BLOCK], tl.float32)
    values = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        values = _values(x, residual, columns, inside)
        if residual is not None:
            tl.store(total + columns, values.to(total.dtype.element_ty), inside)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares) / size + eps)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        if not WHOLE:
            values = _values(x, residual, columns, inside)
        factors = tl.load(weight + columns, inside, 0.0).to(tl.float32)
        tl.store(out + columns, (values * scale * factors).to(out.dtype.element_ty), inside)


@triton.jit
def _values(x, residual, columns, inside):
    """Returns the values to norm, in float32."""
    given = tl.load(x + columns, inside, 0.0)
    values = given.to(tl.float32)
    if residual is not None:
        total = values + tl.load(residual + columns, inside, 0.0).to(tl.float32)
        values = total.to(given.dtype).to(tl.float32)
    return values
