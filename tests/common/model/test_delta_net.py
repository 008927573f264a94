"""The gated delta net, Mamba and Mamba-2 over paged states: in C++ and in torch."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.delta_net import DeltaBackend, DeltaInputs, DeltaSizes
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.selective import SelectiveInputs, SelectiveSizes
from pdserve.common.model.ssd import SSDInputs, SSDSizes

SIZES = DeltaSizes(ratio=2, key_dim=20, value_dim=76, kernel=4)  # more than four vectors and less
MAMBA2 = SSDSizes(heads=6, head_dim=5, groups=2, state_dim=20, kernel=4)  # 110 channels
MAMBA = SelectiveSizes(inner=70, heads=2, state_dim=20, rank=3, kernel=4)
UNITS, BLOCK_SIZE, NUM_BLOCKS = 3, 16, 24
NONE = -1
KINDS = ["delta net", "mamba 2", "mamba"]


def some_inputs(kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "mamba 2":
        return SSDInputs(
            MAMBA2,
            random(tokens, MAMBA2.width).to(dtype),
            random(tokens, MAMBA2.heads).abs(),
            -random(MAMBA2.heads).abs(),
            random(MAMBA2.heads),
            random(MAMBA2.kernel, MAMBA2.width),
            random(MAMBA2.width),
        )
    if kind == "mamba":
        chosen = MAMBA.rank + 2 * MAMBA.state_dim
        return SelectiveInputs(
            MAMBA,
            random(tokens, MAMBA.inner).to(dtype),
            1e-6,
            random(MAMBA.kernel, MAMBA.inner),
            random(MAMBA.inner),
            random(MAMBA.heads, chosen, MAMBA.inner // MAMBA.heads).to(dtype),
            random(chosen).to(dtype),
            random(MAMBA.heads, MAMBA.inner // MAMBA.heads, MAMBA.rank).to(dtype),
            random(MAMBA.inner),
            -random(MAMBA.inner, MAMBA.state_dim).abs(),
            random(MAMBA.inner),
        )
    return DeltaInputs(
        SIZES,
        random(tokens, UNITS, SIZES.width).to(dtype),
        -random(tokens, UNITS, SIZES.ratio).abs(),
        random(tokens, UNITS, SIZES.ratio).sigmoid(),
        random(UNITS, SIZES.width, SIZES.kernel),
    )


def of_tokens(inputs: Any, tokens: torch.Tensor) -> Any:
    names = {each.name for each in fields(inputs)} & {"mixed", "steps", "decays", "betas"}
    return replace(inputs, **{name: getattr(inputs, name)[tokens] for name in names})


class Paged:
    """States that begin as NaN, which no kernel may read."""

    def __init__(self, kernels: str, inputs: Any) -> None:
        self.backend = DeltaBackend(choose_kernels(kernels, torch.device("cpu")))
        self.states = torch.full((NUM_BLOCKS, inputs.units, inputs.numbers), torch.nan)

    def step(self, inputs: Any, *parts: tuple[int, int, list[int]]) -> torch.Tensor:
        """`parts`: (start, end, block table) of sequences, which all have the same inputs."""
        tokens = torch.cat([torch.arange(start, end) for start, end, _ in parts])
        lengths, starts = [end - start for start, end, _ in parts], [start for start, _, _ in parts]
        tables = [table for _, _, table in parts]
        batch = AttentionBatch(lengths, starts, tables, BLOCK_SIZE)
        context = self.backend.prepare(batch)
        return self.backend.scan(of_tokens(inputs, tokens), self.states, context)


def chunks(kernels: str, inputs: Any, cuts: list[int]) -> tuple[torch.Tensor, Paged]:
    """The output of one sequence in these chunks, all of whose blocks have a state."""
    paged = Paged(kernels, inputs)
    table = list(range(8))
    found = [paged.step(inputs, (start, end, table)) for start, end in pairwise(cuts)]
    return torch.cat(found), paged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[0, 100], [0, 7, 16, 17, 48, 90, 99, 100], [*range(101)]])
def test_chunks_and_blocks_change_no_bit_of_a_state(kind: str, cuts: list[int]) -> None:
    inputs = some_inputs(kind, 100)
    whole, first = chunks("native", inputs, [0, 100])
    found, paged = chunks("native", inputs, cuts)
    if kind == "mamba":  # torch multiplies between the convolution and the scan
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(paged.states[:7], first.states[:7], rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, whole)
        assert torch.equal(paged.states[:7], first.states[:7])
    assert paged.states[7:].isnan().all(), "nothing is written beside the table"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[0, 100], [0, 7, 16, 17, 48, 90, 99, 100]])
def test_both_are_one_function(kind: str, cuts: list[int]) -> None:
    inputs = some_inputs(kind, 100)
    natively, left = chunks("native", inputs, cuts)
    in_torch, right = chunks("torch", inputs, cuts)
    torch.testing.assert_close(natively, in_torch, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left.states[:7], right.states[:7], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_sequences_of_a_step_have_states_of_their_own(kind: str, kernels: str) -> None:
    """Prompts and single tokens; a state is written where the table has a block, and read where the
    tokens before ended, which may be another sequence's full block."""
    inputs = some_inputs(kind, 100)
    paged = Paged(kernels, inputs)
    expected, alone = chunks(kernels, inputs, [0, 40, 41, 100])
    paged.step(inputs, (0, 40, [NONE, 3, 9]), (0, 32, [NONE, 4]), (0, 1, [5]))
    torch.testing.assert_close(paged.states[3], paged.states[4])
    found = paged.step(
        inputs,
        (40, 41, [NONE, NONE, 9]),
        (32, 100, [NONE, 4, NONE, NONE, NONE, 6, 7]),
        (1, 2, [5]),
    )
    torch.testing.assert_close(found[0], expected[40], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:69], expected[32:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[69], expected[1], rtol=1e-4, atol=1e-5)
    for block, same in ((6, 5), (7, 6), (4, 1)):
        torch.testing.assert_close(paged.states[block], alone.states[same], rtol=1e-4, atol=1e-5)
    written = {3, 4, 5, 6, 7, 9}
    for block in range(NUM_BLOCKS):
        assert bool(paged.states[block].isnan().any()) == (block not in written)


@pytest.mark.parametrize("kind", ["delta net", "mamba 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_states_in_float32(kind: str, dtype: torch.dtype) -> None:
    inputs = some_inputs(kind, 50, dtype)
    in_half, states = chunks("native", inputs, [0, 50])
    precise = replace(inputs, mixed=inputs.mixed.float())
    found, other = chunks("native", precise, [0, 50])
    assert in_half.dtype is dtype and torch.equal(states.states[:4], other.states[:4])
    torch.testing.assert_close(in_half.float(), found, rtol=1e-2, atol=1e-2)
