"""Products with packed numbers in groups: that they are those of float64, whatever else is in the
batch, for every order of the inputs, and where matrices cannot be packed."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.grouped_matrix import MAX_RUN, GroupedMatrix, Runs
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.model.sharding import Sharding
from tiny_engine import CPU

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here"),
]

NATIVE = NativeKernels()
KINDS = {
    "4 bits": Quantization("awq", 4),
    "8 bits": Quantization("gptq", 8, zero_offset=1),
    "4 bits, symmetric": Quantization("compressed-tensors", 4, zero_offset=8, symmetric=True),
    "8 bits, symmetric": Quantization("compressed-tensors", 8, zero_offset=128, symmetric=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Outputs, inputs, inputs of a group.
SHAPES = [(8, 8, 8), (32, 96, 32), (40, 160, 32), (100, 576, 64), (24, 72, 24), (96, 1000, 1000)]
SHAPES += [(64, 1024, 128), (72, 1536, 512), (16, 344, 344)]


def matrix_of(
    kind: Quantization, dtype: torch.dtype, rows: int, group_of: Tensor, native: bool = True
) -> GroupedMatrix:
    """Random, and the same numbers whatever the dtype."""
    kernels = NATIVE if native else TorchKernels()
    sharding = Sharding(GroupCoordinator(), CPU, dtype, kernels=kernels)
    groups = int(group_of.max()) + 1
    matrix = GroupedMatrix(rows, group_of.int(), groups, sharding, kind)
    draw = torch.Generator().manual_seed(0)
    for tensor, end in ((matrix.values, 256), (matrix.zeros, 2**kind.bits - 1)):
        part = tensor[:rows]
        part.copy_(torch.randint(0, end, part.shape, generator=draw, dtype=torch.uint8))
    scales = torch.logspace(-3, -1.8, rows)[:, None] * (1 + torch.arange(groups) % 3)
    matrix.scales[:rows] = scales.bfloat16()
    matrix.pack()
    return matrix


def made(kind: Quantization, dtype: torch.dtype, rows: int, group_of: Tensor) -> GroupedMatrix:
    matrix = matrix_of(kind, dtype, rows, group_of)
    assert matrix.packed
    return matrix


def even(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // size


def tokens(count: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(kind: Quantization, rows: int, group_of: Tensor) -> Tensor:
    return matrix_of(kind, torch.float32, rows, group_of, native=False).dense().double()


def check(matrix: GroupedMatrix, kind: Quantization, x: Tensor, bias: Tensor | None = None) -> None:
    """A token's numbers are off by half a step of their run; six deviations of their sum."""
    weights = weights_of(kind, matrix.rows, matrix.group_of)
    exact = x.double() @ weights.t()
    norms = weights.norm(dim=1)
    lost = 1e-6 * x.double().norm(dim=1)[:, None] * (norms + 16 * weights.abs().amax(1))
    if x.dtype == torch.bfloat16:
        largest = x.double().abs().amax(1, keepdim=True)
        lost = lost + 6 / 12**0.5 * largest / (127 if kind.bits == 4 else 32639) * norms
    exact = exact if bias is None else exact + bias.double()
    out = matrix.linear(x, bias)
    assert out.dtype == x.dtype and out.shape == exact.shape
    assert ((out.double() - exact).abs() <= lost + torch.finfo(x.dtype).eps * exact.abs()).all()


@every_kind
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_float64(
    kind: Quantization, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, inputs, size = shape
    matrix = made(kind, dtype, rows, even(inputs, size))
    bias = tokens(1, rows, dtype, seed=2)[0]
    for count in (0, 1, 2, 3, 5, 7, 9, 13, 25, 193):
        check(matrix, kind, tokens(count, inputs, dtype))
        check(matrix, kind, tokens(count, inputs, dtype), bias)


@every_kind
@every_dtype
def test_a_token_is_computed_alike_in_any_company(kind: Quantization, dtype: torch.dtype) -> None:
    """To the bit: alone, in tiles of every size, and on any number of threads."""
    matrix, x = made(kind, dtype, 328, even(192, 64)), tokens(230, 192, dtype)
    together = matrix.linear(x, None)
    for first, last in ((0, 1), (3, 5), (10, 17), (100, 113), (190, 230)):
        assert torch.equal(matrix.linear(x[first:last], None), together[first:last])
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.equal(matrix.linear(x, None), together)


@every_kind
@every_dtype
def test_tokens_may_be_part_of_wider_rows(kind: Quantization, dtype: torch.dtype) -> None:
    matrix, wide = made(kind, dtype, 64, even(64, 32)), tokens(6, 150, dtype)
    for x in (wide[:, 7:71], wide[::2, :64], tokens(64, 6, dtype).t()):
        assert torch.equal(matrix.linear(x, None), matrix.linear(x.contiguous(), None))


@every_kind
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_in_their_row(
    kind: Quantization, dtype: torch.dtype, bad: float
) -> None:
    x = tokens(7, 128, dtype)
    x[4, 40] = bad
    out = made(kind, dtype, 32, even(128, 32)).linear(x, None)
    rows = torch.arange(7) == 4
    assert torch.equal(~out.isfinite().all(1), rows) and torch.equal(~out.isfinite().any(1), rows)


@every_kind
@every_dtype
def test_numbers_of_every_size(kind: Quantization, dtype: torch.dtype) -> None:
    """Zeros, tiny and huge ones, and a token with one that is far larger than the others."""
    matrix, x = made(kind, dtype, 32, even(128, 32)), tokens(5, 128, dtype)
    x[0], x[1], x[2, 9] = 0, x[1] * 1e-20, 1e4
    x[3] *= 1e30
    check(matrix, kind, x)
    assert matrix.linear(x, None)[0].eq(0).all()
    x[1] = 1e-37  # too small to be multiples of anything
    assert matrix.linear(x, None)[1].abs().lt(1e-34).all()


def test_one_large_number_costs_its_run_alone() -> None:
    kind = KINDS["4 bits"]
    matrix, x = made(kind, torch.bfloat16, 32, even(256, 32)), tokens(1, 256, torch.bfloat16)
    x[0, 200] = 1e4
    weights = weights_of(kind, 32, matrix.group_of)
    weights[:, 192:224] = 0
    values = x.clone()
    values[0, 192:224] = 0
    check(matrix, kind, values)
    assert (matrix.linear(x, None) - matrix.linear(values, None)).abs().amax() > 10


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_do_not_overflow(bits: int) -> None:
    kind = Quantization("gptq", bits)
    sharding = Sharding(GroupCoordinator(), CPU, torch.bfloat16, kernels=NATIVE)
    matrix = GroupedMatrix(32, even(1 << 16, 1 << 16).int(), 1, sharding, kind)
    matrix.values.fill_(255)
    matrix.scales.fill_(1)
    matrix.pack()
    x = torch.full((2, 1 << 16), -3.0, dtype=torch.bfloat16)
    x[1] = 3.0
    expected = torch.tensor([[-3.0], [3.0]]) * (2**bits - 1) * (1 << 16)
    assert matrix.packed
    torch.testing.assert_close(
        matrix.linear(x, None).float(), expected.expand(2, 32), rtol=0.01, atol=0
    )


# ---- the order of inputs ----


@every_kind
@every_dtype
def test_inputs_of_any_group(kind: Quantization, dtype: torch.dtype) -> None:
    """`desc_act`, groups that ranks split, and groups without inputs."""
    shuffled = even(192, 32)[torch.randperm(192, generator=torch.Generator().manual_seed(3))]
    split, missing = (torch.arange(16, 208)) // 64, even(192, 64) * 2
    for group_of in (shuffled, split, missing):
        matrix = made(kind, dtype, 40, group_of)
        for count in (1, 6, 30):
            check(matrix, kind, tokens(count, 192, dtype))


@every_kind
@every_dtype
def test_a_packed_matrix_is_where_the_plain_one_was(kind: Quantization, dtype: torch.dtype) -> None:
    shuffled = even(192, 32)[torch.randperm(192, generator=torch.Generator().manual_seed(3))]
    for group_of in (even(192, 64), shuffled):
        plain = matrix_of(kind, dtype, 40, group_of, native=False)
        matrix = made(kind, dtype, 40, group_of)
        places = [matrix.values.data_ptr(), matrix.scales.data_ptr()]
        for _ in range(2):  # the second time it is already
            matrix.pack()
            assert torch.equal(matrix.dense(), plain.dense())
            assert places == [matrix.values.data_ptr(), matrix.scales.data_ptr()]


def test_the_longest_runs_of_one_group() -> None:
    def lengths(group_of: Tensor) -> list[int | None]:
        found = [Runs.of(group_of.int(), bits, len(group_of)) for bits in (4, 8)]
        return [None if each is None else each.length for each in found]

    assert lengths(even(256, 32)) == [32, 32]
    assert lengths(even(1024, 1024)) == [MAX_RUN, MAX_RUN]
    assert lengths(torch.arange(24, 120) // 64) == [8, 8]
    assert lengths(even(72, 12)) == [None, 12]
    assert lengths(even(70, 10)) == [None, None]


@every_dtype
def test_matrices_that_cannot_be_packed_are_dequantized(dtype: torch.dtype) -> None:
    """Groups of an odd number of inputs, and float16."""
    kind = KINDS["4 bits"]
    for matrix in (
        matrix_of(kind, dtype, 16, even(60, 20)),
        matrix_of(kind, torch.float16, 16, even(64, 32)),
    ):
        x = tokens(3, len(matrix.group_of), matrix.scales.dtype)
        assert not matrix.packed
        torch.testing.assert_close(matrix.linear(x, None), x @ matrix.dense().t())
