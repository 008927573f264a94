"""Mamba-2 (state-space duality, arXiv:2405.21060): layers whose states are stored like those of the
gated delta net (`delta_net.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.delta_net import DeltaContext, OneUnitInputs
from pdserve.common.model.kernels.native import NativeKernels, call_of

MAX_CHUNK = 256  # tokens that torch computes at a time


@dataclass(frozen=True, slots=True)
class SSDSizes:
    """The sizes of a layer, all of whose heads are one unit."""

    heads: int
    head_dim: int
    groups: int  # of heads with the same B and C
    state_dim: int
    kernel: int  # inputs that the convolution sees

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Elements per token: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def matrices(self) -> int:
        return self.inner * self.state_dim

    @property
    def numbers(self) -> int:
        """Elements of a state: a matrix per head, and the last inputs of the convolution."""
        return self.matrices + (self.kernel - 1) * self.width


@dataclass(frozen=True, slots=True)
class SSDInputs(OneUnitInputs[SSDSizes]):
    """A layer's inputs for a step's T tokens; `mixed` is `[T, width]`, the others are float32."""

    steps: Tensor  # [T, heads], time steps
    rates: Tensor  # [heads], decay rates, negative
    skips: Tensor  # [heads], factors of x in the output
    weights: Tensor  # of the convolution, [kernel, width]
    bias: Tensor  # [width]

    def scan_natively(
        self, kernels: NativeKernels, states: Tensor, context: DeltaContext, out: Tensor
    ) -> None:
        sizes, mixed, steps = self.sizes, self.mixed.contiguous(), self.steps.contiguous()
        kernels.ssd(
            *call_of(mixed), len(context.rows), sizes.heads, sizes.head_dim, sizes.groups,
            sizes.state_dim, sizes.kernel, context.block_size, mixed.data_ptr(),
            self.weights.data_ptr(), self.bias.data_ptr(), steps.data_ptr(),
            self.rates.data_ptr(), self.skips.data_ptr(), states.data_ptr(),
            context.rows.ctypes.data, context.counts.ctypes.data, context.starts.ctypes.data,
            context.tables.ctypes.data, context.tables.shape[1], out.data_ptr(),
        )  # fmt: skip

    def rule(self, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """rows `[B, n]`, before `[B, 1, numbers]` → `[B, n, heads · head_dim]`, states after
        them."""
        from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan  # takes seconds

        sizes, (batch, length) = self.sizes, rows.shape
        matrices, past = before[:, 0].split((sizes.matrices, sizes.numbers - sizes.matrices), -1)
        past = past.view(batch, sizes.kernel - 1, sizes.width)
        seen = torch.cat((past, self.mixed[rows].float()), dim=1)
        kernel = self.weights.t()[:, None]
        mixed = F.conv1d(seen.transpose(1, 2), kernel, self.bias, groups=sizes.width)
        of_groups = sizes.groups * sizes.state_dim
        parts = F.silu(mixed).transpose(1, 2).split((sizes.inner, of_groups, of_groups), dim=-1)
        x, b, c = (
            each.unflatten(-1, (count, -1))
            for each, count in zip(parts, (sizes.heads, sizes.groups, sizes.groups), strict=True)
        )
        state = matrices.reshape(batch, sizes.heads, sizes.head_dim, sizes.state_dim)
        out, after = mamba2_chunk_scan(
            x, self.steps[rows], self.rates, b, c, chunk_size=min(length, MAX_CHUNK), D=self.skips,
            initial_states=state, return_final_states=True,
        )  # fmt: skip
        left = seen[:, length:].flatten(1)
        return out.flatten(2), torch.cat((after.flatten(1), left), dim=-1)[:, None]
