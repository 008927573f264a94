"""Mamba's selective state space (arXiv:2312.00752): layers whose states are stored like those of
the delta net (`delta_net.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.delta_net import DeltaContext, OneUnitInputs
from pdserve.common.model.kernels.native import NativeKernels, call_of


@dataclass(frozen=True, slots=True)
class SelectiveSizes:
    """The sizes of a layer, which is one unit."""

    inner: int  # channels
    heads: int  # parts of the channels, each with its own time steps, B and C
    state_dim: int
    rank: int  # of the projection that makes the time steps
    kernel: int  # inputs that the convolution sees

    @property
    def matrices(self) -> int:
        return self.inner * self.state_dim

    @property
    def numbers(self) -> int:
        """Elements of a state: a vector per channel, and the last inputs of the convolution."""
        return self.matrices + (self.kernel - 1) * self.inner


@dataclass(frozen=True, slots=True)
class SelectiveInputs(OneUnitInputs[SelectiveSizes]):
    """The inputs of a layer for a step's T tokens; `mixed` is `[T, inner]`. Those without another
    dtype are float32."""

    eps: float | None  # of the norms of the steps' inputs, B and C; None: no norms
    weights: Tensor  # of the convolution, [kernel, inner]
    bias: Tensor  # [inner]
    chooses: Tensor  # [heads, rank + 2 · state_dim, inner / heads] in the model's dtype
    norms: Tensor  # [rank + 2 · state_dim] in the model's dtype
    lengths: Tensor  # [heads, inner / heads, rank] in the model's dtype
    length_bias: Tensor  # [inner]
    rates: Tensor  # [inner, state_dim], of decay: negative
    skips: Tensor  # [inner], the factor of x that is added to the output

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, of convolved x `[N, inner]`, the time steps `[N, inner]`, and B and C beside
        each other `[N, heads, 2 · state_dim]`, both float32."""
        sizes = self.sizes
        parts = (sizes.rank, sizes.state_dim, sizes.state_dim)
        by_head = x.to(self.mixed.dtype).unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        found = (by_head @ self.chooses.mT).split(parts, dim=-1)
        if self.eps is not None:
            norms = self.norms.split(parts)
            found = tuple(map(self._normed, found, norms))
        steps = (found[0] @ self.lengths.mT).transpose(0, 1).flatten(1).float()
        chosen = torch.cat(found[1:], dim=-1).transpose(0, 1).float()
        return F.softplus(steps + self.length_bias), chosen.contiguous()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * weight

    def scan_natively(
        self, kernels: NativeKernels, states: Tensor, context: DeltaContext, out: Tensor
    ) -> None:
        sizes, mixed, x = self.sizes, self.mixed.contiguous(), self.room()
        held = (
            states.data_ptr(), context.rows.ctypes.data, context.counts.ctypes.data,
            context.starts.ctypes.data, context.tables.ctypes.data, context.tables.shape[1],
        )  # fmt: skip
        kernels.convolve(
            *call_of(mixed), len(context.rows), sizes.inner, sizes.kernel, sizes.matrices,
            sizes.numbers, context.block_size, mixed.data_ptr(), self.weights.data_ptr(),
            self.bias.data_ptr(), *held, x.data_ptr(),
        )  # fmt: skip
        steps, chosen = self.choose(x)
        kernels.selective_scan(
            *call_of(x), len(context.rows), sizes.inner, sizes.inner // sizes.heads,
            sizes.state_dim, sizes.numbers, context.block_size, x.data_ptr(), steps.data_ptr(),
            chosen.data_ptr(), self.rates.data_ptr(), self.skips.data_ptr(), *held, out.data_ptr(),
        )  # fmt: skip

    def rule(self, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """rows `[B, n]`, before `[B, 1, numbers]` → `[B, n, inner]`, states after them."""
        sizes, (batch, length) = self.sizes, rows.shape
        state, past = before[:, 0].split((sizes.matrices, sizes.numbers - sizes.matrices), -1)
        past = past.view(batch, sizes.kernel - 1, sizes.inner)
        seen = torch.cat((past, self.mixed[rows].float()), dim=1)
        kernel = self.weights.t()[:, None]
        x = F.silu(F.conv1d(seen.transpose(1, 2), kernel, self.bias, groups=sizes.inner)).mT
        steps, chosen = self.choose(x.flatten(0, 1))
        steps = steps.view(x.shape)
        wide = chosen.repeat_interleave(sizes.inner // sizes.heads, dim=1)
        b, c = wide.view(*x.shape, -1).chunk(2, dim=-1)
        state, outs = state.view(batch, sizes.inner, sizes.state_dim), []
        for t in range(length):
            step = steps[:, t, :, None]
            state = state * torch.exp(step * self.rates) + step * x[:, t, :, None] * b[:, t]
            outs.append((state * c[:, t]).sum(-1))
        out = torch.stack(outs, dim=1) + x * self.skips
        left = seen[:, length:].flatten(1)
        return out, torch.cat((state.flatten(1), left), dim=-1)[:, None]
