"""Activations of MLPs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.model.kernels.gpu.launch import launch

BLOCK = 1024  # features of a program


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns SwiGLU's product (arXiv:2002.05202) of [T, 2 · size]: silu(left) · right half."""
    gate_up = gate_up.contiguous()
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    launch(_silu_and_mul, (tokens, triton.cdiv(size, BLOCK)), gate_up, out, size, BLOCK=BLOCK)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0)
    # Rounded like torch: silu's result to the dtype, then the product.
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + columns, product.to(up.dtype), inside)
