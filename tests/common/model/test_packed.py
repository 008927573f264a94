"""Packed matrices: that they multiply as float64 does, whatever else is in the batch, that they
are where the plain ones were, and models made of them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from paths import MODELS
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.model.kernels.packed import MAX_INT8_INPUTS, Packer
from pdserve.common.model.moe import MoE
from pdserve.common.model.stages import Stage
from pdserve.common.model.weights import WeightMatrix
from thinned import only
from tiny_engine import load, new_cache, some_tokens, step

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here"),
]

# Of the tokens, and of the matrix.
KINDS = [
    pytest.param(torch.float32, torch.float32, id="float32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bfloat16"),
    pytest.param(torch.float32, torch.int8, id="int8 × float32"),
    pytest.param(torch.bfloat16, torch.int8, id="int8 × bfloat16"),
]
every_kind = pytest.mark.parametrize(("dtype", "stored"), KINDS)


@pytest.fixture
def packer() -> Packer:
    """Packs whatever it can, whichever CPU this is."""
    return Packer(NativeKernels().function)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    return torch.randn(shape, generator=generator).to(dtype)


def packed(packer: Packer, matrix: Tensor) -> Tensor:
    assert packer.takes(matrix)
    matrix = matrix.clone()
    packer.pack(matrix)
    return matrix


def scales_of(matrix: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Within a factor of 16 of each other."""
    if matrix.dtype != torch.int8:
        return None
    return torch.logspace(-3, -1.8, len(matrix)).to(dtype)


# ---- one product ----


@every_kind
@pytest.mark.parametrize(
    "tokens", only([0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 25, 192, 193, 400], [0, 1, 5, 13, 193])
)
@pytest.mark.parametrize("shape", [(32, 4), (96, 20), (160, 576), (64, 1028)], ids=str)
def test_products_are_those_of_float64(
    packer: Packer, shape: tuple[int, int], tokens: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    matrix, x = some(*shape, dtype=stored), some(tokens, shape[1], dtype=dtype, seed=1)
    bias, scales = some(shape[0], dtype=dtype, seed=2), scales_of(matrix, dtype)
    weights = matrix.double() if scales is None else matrix.double() * scales.double()[:, None]
    for some_bias in (None, bias):
        out = packer.linear(x, packed(packer, matrix), some_bias, scales)
        exact = x.double() @ weights.t()
        # A chain of sums loses more than torch's tree of them, and a token rounded to 16 bits a
        # little of its largest number.
        lost = 1e-6 * (x.double().norm(dim=1)[:, None] * weights.norm(dim=1))
        lost = lost + 2e-5 * (stored == torch.int8 and dtype == torch.bfloat16) * lost / 1e-6
        exact = exact if some_bias is None else exact + some_bias.double()
        lost = lost + torch.finfo(dtype).eps * exact.abs()
        assert out.dtype == dtype and out.shape == exact.shape
        assert ((out.double() - exact).abs() <= lost).all()


@every_kind
def test_a_token_is_computed_alike_in_any_company(
    packer: Packer, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """To the bit: alone, in tiles of every size, and on any number of threads."""
    matrix = some(320, 132, dtype=stored)
    scales, matrix = scales_of(matrix, dtype), packed(packer, matrix)
    x = some(230, 132, dtype=dtype, seed=1)
    together = packer.linear(x, matrix, None, scales)
    for first, last in ((0, 1), (3, 5), (10, 17), (100, 113), (190, 230)):
        alone = packer.linear(x[first:last], matrix, None, scales)
        assert torch.equal(alone, together[first:last])
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.equal(packer.linear(x, matrix, None, scales), together)


@every_kind
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_share_the_inputs_make_the_same_sums(
    packer: Packer, ranks: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """To the bit, if they add up theirs as a tree: so does each of blocks."""
    block = 12
    matrix, x = some(96, 8 * block, dtype=stored), some(27, 8 * block, dtype=dtype, seed=1)
    scales, bias = scales_of(matrix, dtype), some(96, dtype=dtype, seed=2)
    alone = packer.linear(x, packed(packer, matrix), bias, scales, block=block)
    parts = [
        packer.linear(inputs, packed(packer, part), None, scales, block=block, partial=True)
        for inputs, part in zip(
            x.chunk(ranks, dim=1),
            (each.contiguous() for each in matrix.chunk(ranks, 1)),
            strict=True,
        )
    ]
    assert all(part.dtype == torch.float32 for part in parts)
    assert torch.equal((tree(parts) + bias).to(dtype), alone)


def tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@every_kind
def test_tokens_may_be_part_of_wider_rows(
    packer: Packer, dtype: torch.dtype, stored: torch.dtype
) -> None:
    matrix = some(64, 40, dtype=stored)
    scales, matrix = scales_of(matrix, dtype), packed(packer, matrix)
    wide = some(6, 100, dtype=dtype, seed=1)
    for x in (wide[:, 7:47], wide[::2, :40], some(40, 6, dtype=dtype).t()):
        expected = packer.linear(x.contiguous(), matrix, None, scales)
        assert torch.equal(packer.linear(x, matrix, None, scales), expected)


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_in_their_row(
    packer: Packer, bad: float, dtype: torch.dtype, stored: torch.dtype
) -> None:
    matrix, x = some(32, 64, dtype=stored), some(7, 64, dtype=dtype, seed=1)
    x[4, 40] = bad
    out = packer.linear(x, packed(packer, matrix), None, scales_of(matrix, dtype))
    rows = torch.arange(7) == 4
    assert torch.equal(~out.isfinite().all(1), rows) and torch.equal(~out.isfinite().any(1), rows)


def test_an_int8_token_of_zeros_is_zero(packer: Packer) -> None:
    matrix, x = some(32, 64, dtype=torch.int8), torch.zeros(3, 64, dtype=torch.bfloat16)
    x[1] = 1e-30  # and one of tiny numbers is not
    out = packer.linear(x, packed(packer, matrix), None, torch.ones(32, dtype=torch.bfloat16))
    assert out[0].eq(0).all() and out[2].eq(0).all()
    expected = 1e-30 * matrix.double().sum(1)
    torch.testing.assert_close(out[1].double(), expected, rtol=0.02, atol=1e-31)


def test_the_longest_int8_rows_do_not_overflow(packer: Packer) -> None:
    """Every number the largest, and of one sign."""
    matrix = torch.full((32, MAX_INT8_INPUTS), 127, dtype=torch.int8)
    x = torch.full((2, MAX_INT8_INPUTS), -3.0, dtype=torch.bfloat16)
    x[1] = 3.0
    out = packer.linear(x, packed(packer, matrix), None, torch.ones(32, dtype=torch.bfloat16))
    expected = torch.tensor([[-3.0], [3.0]]) * 127 * MAX_INT8_INPUTS
    torch.testing.assert_close(out.float(), expected.expand(2, 32), rtol=0.01, atol=0)


# ---- where it is ----


@every_kind
def test_a_packed_matrix_takes_the_memory_of_the_plain_one(
    packer: Packer, dtype: torch.dtype, stored: torch.dtype
) -> None:
    kernels = TorchKernels()
    kernels.packer = packer
    plain = some(96, 40, dtype=stored)
    matrix = WeightMatrix(plain.clone(), kernels)
    before = matrix.tensor.data_ptr()
    for _ in range(2):  # the second time it is already
        matrix.pack()
        assert matrix.packed and matrix.tensor.data_ptr() == before
        assert matrix.tensor.shape == plain.shape and not torch.equal(matrix.tensor, plain)
        assert torch.equal(matrix.dense(), plain)
    ids = torch.tensor([95, 0, 17, 17, 32])
    assert torch.equal(matrix.rows(ids), plain[ids])
    assert matrix.rows(ids[:0]).shape == (0, 40)
    for wrong in (-1, 96):
        with pytest.raises(IndexError, match="96"):
            matrix.rows(torch.tensor([3, wrong]))


def test_matrices_that_cannot_be_packed_are_left_as_they_are(packer: Packer) -> None:
    taken = some(64, 32, dtype=torch.float32)
    assert packer.takes(taken)
    others = [
        taken[:63],  # without what `padded` adds
        taken.t(),
        taken.half(),
        some(64, 33, dtype=torch.bfloat16),
        some(64, 30, dtype=torch.int8),
        torch.zeros(32, MAX_INT8_INPUTS + 4, dtype=torch.int8),
        taken.to("meta"),
    ]
    for other in others:
        assert not packer.takes(other)
    kernels = TorchKernels()
    kernels.packer = packer
    matrix = WeightMatrix(taken.half(), kernels)
    matrix.pack()
    x = some(3, 32, dtype=torch.float16)
    assert not matrix.packed and torch.equal(matrix.linear(x), x @ taken.half().t())


@every_kind
@pytest.mark.parametrize("rows", [1, 8, 33, 60])
def test_a_matrix_of_any_number_of_rows_is_packed_with_zeros_behind(
    packer: Packer, dtype: torch.dtype, stored: torch.dtype, rows: int
) -> None:
    kernels = TorchKernels()
    kernels.packer = packer
    plain = some(rows, 64, dtype=stored)
    matrix = WeightMatrix(plain, kernels)
    matrix.tensor.copy_(plain)
    matrix.pack()
    assert matrix.packed and torch.equal(matrix.dense(), plain)
    x, bias, scales = (some(*shape, dtype=dtype) for shape in ((5, 64), (rows,), (rows,)))
    if stored == torch.int8:
        found, product = matrix.scaled_linear(x, scales, bias), x @ plain.to(dtype).t() * scales
    else:
        found, product = matrix.linear(x, bias), x @ plain.t()
    assert found is not None and found.is_contiguous()
    torch.testing.assert_close(found, product + bias, rtol=0.02, atol=0.05)


# ---- whole models ----

NAMES = ["llama-gqa", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe"]


def native_model(name: str, **options: Any) -> CausalLM:
    return load(MODELS / name, kernels=NativeKernels(), **options)


def logits(model: CausalLM) -> Tensor:
    return step(model, new_cache(model), [(some_tokens(40), 0, [4, 2, 6])])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_packed_matrices_says_the_same(name: str) -> None:
    plain, ours = load(MODELS / name), native_model(name)
    layer = ours.layers[0]
    assert layer.attention.qkv_proj.weight.matrix.packed
    assert ours.head is not None and ours.head.lm_head.weight.matrix.packed
    if isinstance(layer.mlp, MoE):
        ordered = plain.layers[0].mlp.experts.down_proj.tensor
        assert not torch.equal(layer.mlp.experts.down_proj.tensor, ordered)
    assert ours.weights_bytes == plain.weights_bytes
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "mixtral", "qwen2-moe"])
def test_an_int8_model_of_packed_matrices_says_the_same(name: str) -> None:
    plain = load(MODELS / name, quantization="int8")
    ours = native_model(name, quantization="int8")
    assert ours.weights_bytes == plain.weights_bytes
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-4, atol=1e-4)


def test_a_stage_packs_what_it_multiplies_by() -> None:
    """A tied embedding of a stage without a head is only looked up."""
    first = native_model("llama-gqa", stage=Stage(0, 2, last=False))
    last = native_model("llama-gqa", stage=Stage(2, 4, first=False))
    assert first.embedding is not None and not first.embedding.weight.matrix.packed
    assert last.head is not None and last.head.lm_head.weight.matrix.packed
