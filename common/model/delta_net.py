"""The gated delta net (arXiv:2412.06464): linear attention whose layers keep a recurrent state of
constant size. Steps compute the states of Mamba-2 (`ssd.py`) in the same way.

A unit is a key head and the value heads that share it. The output of a token depends on the state
after the token before it, and on no other earlier token:

    state after token 31       chunk of tokens 32 … 99, block size 16       states it leaves
    block 1 ────────────────▶  32 33 … 47 │ … 79 80 … 95 │ 96 … 99  ─────▶  block 5 (after 95)
                                                                            block 6 (after 99)

A state is written at the end of each block of the sequence's table, and after the last token,
except where the table has no block (`NO_BLOCK`). A new sequence starts from a zero state, whatever
its blocks contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.model.attention import AttentionBatch, StepBackend
from pdserve.common.model.attention_native import Int32s, pad
from pdserve.common.model.kernels.native import NativeKernels, call_of
from pdserve.common.model.kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of a layer's unit: a key head with `ratio` value heads."""

    ratio: int
    key_dim: int
    value_dim: int
    kernel: int  # inputs that the convolution sees

    @property
    def width(self) -> int:
        """Elements per token: query, key and values."""
        return 2 * self.key_dim + self.ratio * self.value_dim

    @property
    def matrices(self) -> int:
        return self.ratio * self.key_dim * self.value_dim

    @property
    def numbers(self) -> int:
        """Elements of a state: a matrix per value head, and the last inputs of the convolution."""
        return self.matrices + (self.kernel - 1) * self.width


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of a layer for a step's T tokens before the convolution."""

    sizes: DeltaSizes
    mixed: Tensor  # [T, units, width]
    decays: Tensor  # float32 [T, units, ratio], logarithms
    betas: Tensor  # float32 [T, units, ratio]
    weights: Tensor  # of the convolution, float32 [units, width, kernel]

    def of_units(self, start: int, end: int) -> DeltaInputs:
        """Returns the inputs of units `start … end-1`."""
        mine = slice(start, end)
        return DeltaInputs(
            self.sizes,
            self.mixed[:, mine],
            self.decays[:, mine],
            self.betas[:, mine],
            self.weights[mine],
        )

    @property
    def units(self) -> int:
        return self.mixed.shape[1]

    @property
    def numbers(self) -> int:
        return self.sizes.numbers

    def output(self) -> Tensor:
        tokens, units, _ = self.mixed.shape
        return self.mixed.new_empty(tokens, units * self.sizes.ratio * self.sizes.value_dim)

    def room(self) -> Tensor:
        tokens, units, _ = self.mixed.shape
        shape = (tokens, units, self.sizes.ratio, self.sizes.value_dim)
        return self.mixed.new_empty(shape, dtype=torch.float32)

    def scan_natively(
        self, kernels: NativeKernels, states: Tensor, context: DeltaContext, out: Tensor
    ) -> None:
        sizes, mixed = self.sizes, self.mixed.contiguous()
        weights, decays, betas = (
            each.contiguous() for each in (self.weights, self.decays, self.betas)
        )
        kernels.delta_net(
            *call_of(mixed), len(context.rows), mixed.shape[1], sizes.ratio, sizes.key_dim,
            sizes.value_dim, sizes.kernel, context.block_size, mixed.data_ptr(), weights.data_ptr(),
            decays.data_ptr(), betas.data_ptr(), states.data_ptr(), context.rows.ctypes.data,
            context.counts.ctypes.data, context.starts.ctypes.data, context.tables.ctypes.data,
            context.tables.shape[1], out.data_ptr(),
        )  # fmt: skip

    def rule(self, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """rows `[B, n]`, before `[B, units, numbers]` → `[B, n, units, ratio, value_dim]`, states
        after them."""
        from transformers.models.qwen3_next.modeling_qwen3_next import (  # takes seconds to import
            torch_chunk_gated_delta_rule,
            torch_recurrent_gated_delta_rule,
        )

        sizes = self.sizes
        (batch, length), units = rows.shape, before.shape[1]
        matrices, past = before.split((sizes.matrices, sizes.numbers - sizes.matrices), dim=-1)
        past = past.view(batch, units, sizes.kernel - 1, sizes.width).transpose(1, 2)
        seen = torch.cat((past, self.mixed[rows].float()), dim=1)  # [B, n + kernel - 1, units, …]
        mixed = F.conv1d(
            seen.flatten(2).transpose(1, 2),
            self.weights.view(-1, 1, sizes.kernel),
            groups=units * sizes.width,
        )
        mixed = F.silu(mixed).transpose(1, 2).unflatten(2, (units, sizes.width))
        values = sizes.ratio * sizes.value_dim
        query, key, value = mixed.split((sizes.key_dim, sizes.key_dim, values), dim=-1)
        rule = torch_recurrent_gated_delta_rule if length == 1 else torch_chunk_gated_delta_rule
        out, after = rule(
            query,
            key,
            value.reshape(batch, length, -1, sizes.value_dim),
            g=self.decays[rows].flatten(2),
            beta=self.betas[rows].flatten(2),
            initial_state=matrices.reshape(batch, -1, sizes.key_dim, sizes.value_dim),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        left = seen[:, length:].transpose(1, 2).flatten(2)
        after = after.reshape(batch, units, sizes.matrices)
        return out.unflatten(2, (units, sizes.ratio)), torch.cat((after, left), dim=-1)


@dataclass(frozen=True)
class DeltaContext:
    """The B sequences of a step: where each begins, and its blocks."""

    block_size: int
    rows: Int32s  # [B] row of the first token in the step
    counts: Int32s  # [B] tokens to compute
    starts: Int32s  # [B] tokens before them; > 0: the token before has a state in the table
    tables: Int32s  # [B, blocks of the longest]

    @cached_property
    def singles(self) -> NDArray[np.int64]:
        """The indices of the sequences with one token."""
        return np.flatnonzero(self.counts == 1)

    def pieces(self, sequence: int) -> Iterator[tuple[int, int]]:
        """Yields ranges `first, last + 1` of a sequence's tokens, each of which ends where a state
        is written."""
        start, count, size = int(self.starts[sequence]), int(self.counts[sequence]), self.block_size
        ends = range(size - start % size, count, size)
        table = self.tables[sequence]
        kept = [end for end in ends if table[(start + end - 1) // size] >= 0]
        edges = [0, *kept, count]
        yield from pairwise(edges)

    def block_of(self, sequence: int, token: int) -> int:
        """Returns the block of the sequence's token `token` of this step; -1 is the one before."""
        return int(self.tables[sequence, (self.starts[sequence] + token) // self.block_size])


class StateInputs(Protocol):
    """A layer's inputs for a step's T tokens, and how to compute states and outputs from them."""

    @property
    def units(self) -> int:
        """The number of parts into which ranks may split a state."""

    @property
    def numbers(self) -> int:
        """The elements of a unit's state."""

    def of_units(self, start: int, end: int) -> StateInputs:
        """Returns the inputs of units `start … end-1`."""

    def output(self) -> Tensor:
        """Returns an empty output `[T, features]` in the inputs' dtype."""

    def room(self) -> Tensor:
        """Returns an empty float32 output `[T, …]` with as many elements."""

    def scan_natively(
        self, kernels: NativeKernels, states: Tensor, context: DeltaContext, out: Tensor
    ) -> None:
        """Computes `DeltaBackend.scan` in C++, into `out` from `room`."""

    def rule(self, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the layer's `Rule`."""


class OneUnitSizes(Protocol):
    """The sizes of a layer with one unit."""

    @property
    def inner(self) -> int:
        """The features of an output."""

    @property
    def numbers(self) -> int: ...  # as `StateInputs.numbers`


Sizes = TypeVar("Sizes", bound=OneUnitSizes)


@dataclass(frozen=True, slots=True)
class OneUnitInputs(Generic[Sizes]):
    """The parts of `StateInputs` of a layer whose state is one unit, which every rank computes."""

    sizes: Sizes
    mixed: Tensor  # [T, …] in the model's dtype: the inputs before the convolution

    @property
    def units(self) -> int:
        return 1

    @property
    def numbers(self) -> int:
        return self.sizes.numbers

    def of_units(self, start: int, end: int) -> Self:
        return self

    def output(self) -> Tensor:
        return self.mixed.new_empty(len(self.mixed), self.sizes.inner)

    def room(self) -> Tensor:
        return self.mixed.new_empty(len(self.mixed), self.sizes.inner, dtype=torch.float32)


class DeltaBackend(StepBackend):
    """Computes layers with a recurrent state: in C++ on a CPU with native `kernels`, else with
    transformers' torch functions, one chunk at a time."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels if isinstance(kernels, NativeKernels) else None

    def prepare(self, batch: AttentionBatch) -> DeltaContext:
        counts = np.asarray(batch.query_lens, np.int32)
        return DeltaContext(
            batch.block_size,
            (np.cumsum(counts) - counts).astype(np.int32),
            counts,
            np.asarray(batch.starts, np.int32),
            pad([np.asarray(table) for table in batch.block_tables]),
        )

    def scan(self, inputs: StateInputs, states: Tensor, context: DeltaContext) -> Tensor:
        """Computes a step's tokens from a layer's `states` `[blocks, units, numbers]`, and writes
        the new states; returns `[T, features]` in the inputs' dtype."""
        out = inputs.room()
        if self._kernels is not None:
            inputs.scan_natively(self._kernels, states, context, out)
        else:
            scan(inputs.rule, out, states, context)
        return out.flatten(1).to(inputs.output().dtype)


Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes `n` tokens of each of B sequences: (their rows in the step `[B, n]`, states before them
`[B, units, numbers]`) → (outputs `[B, n, …]`, states after them)."""


def scan(rule: Rule, out: Tensor, states: Tensor, context: DeltaContext) -> None:
    """Computes a step's tokens with `rule` into `out` `[T, …]`; reads and writes a layer's `states`
    `[blocks, units, numbers]`."""
    if len(singles := context.singles):
        _advance(rule, out, states, context, singles.tolist(), 0, 1)
    for sequence in np.flatnonzero(context.counts > 1).tolist():
        for first, end in context.pieces(sequence):
            _advance(rule, out, states, context, [sequence], first, end)


def _advance(
    rule: Rule,
    out: Tensor,
    states: Tensor,
    context: DeltaContext,
    sequences: list[int],
    first: int,
    end: int,
) -> None:
    """Computes tokens `first … end-1` of each sequence, and writes the states after them."""
    device = states.device
    begun = [int(context.starts[each]) + first > 0 for each in sequences]
    blocks = [
        context.block_of(each, first - 1) if has else 0
        for each, has in zip(sequences, begun, strict=True)
    ]
    before = states[torch.tensor(blocks, device=device)]
    before = before.where(torch.tensor(begun, device=device)[:, None, None], 0.0)
    starts = torch.tensor([int(context.rows[each]) + first for each in sequences])
    rows = (starts[:, None] + torch.arange(end - first)).to(device)
    out[rows], after = rule(rows, before)
    blocks = [context.block_of(each, end - 1) for each in sequences]
    states[torch.tensor(blocks, device=device)] = after
