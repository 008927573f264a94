"""Products with quantized matrices on GPUs against float64: in Triton's interpreter without a GPU,
on the GPU where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product as pairs
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model import split_logits
from torch import Tensor

from benchmarks.quantized_folder import Scheme, quantize_folder
from interpreted import DEVICE
from paths import MODELS
from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model import grouped_matrix
from pdserve.common.model.grouped_matrix import GroupedMatrix
from pdserve.common.model.kernels.gpu import launch, products
from pdserve.common.model.kernels.gpu.products import MOST_TOKENS, TOKENS, GpuProducts
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.model.kernels.quantized import EvenGroups
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.weights import Int8Matrix
from tiny_engine import load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

KINDS = {
    "4 bits": Quantization("awq", 4),
    "8 bits": Quantization("gptq", 8, zero_offset=1),
    "4 bits, symmetric": Quantization("compressed-tensors", 4, zero_offset=8, symmetric=True),
    "8 bits, symmetric": Quantization("compressed-tensors", 8, zero_offset=128, symmetric=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16)),
    ],
    ids=str,
)
models_on_cpu = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="this test's models are on the CPU, and kernels on the GPU"
)
# Outputs, inputs, inputs of a group.
SHAPES = [
    *((8, 32, 16), (100, 96, 32), (16, 344, 344)),
    *(pytest.param(s, marks=pytest.mark.slow) for s in ((72, 1536, 512), (130, 1024, 128))),
]


def kernels() -> TorchKernels:
    found = TorchKernels()
    found.products = GpuProducts()
    return found


def grouped(
    kind: Quantization, dtype: torch.dtype, rows: int, group_of: Tensor, groups: int | None = None
) -> GroupedMatrix:
    sharding = Sharding(GroupCoordinator(), DEVICE, dtype, kernels=kernels())
    count = groups or int(group_of.max()) + 1
    matrix = GroupedMatrix(rows, group_of.int().to(DEVICE), count, sharding, kind)
    draw = torch.Generator().manual_seed(0)
    for tensor, end in ((matrix.values, 256), (matrix.zeros, 2**kind.bits - 1)):
        tensor.copy_(torch.randint(0, end, tensor.shape, generator=draw, dtype=torch.uint8))
    scales = torch.logspace(-3, -1.8, rows)[:, None] * (1 + torch.arange(count) % 3)
    matrix.scales.copy_(scales.to(dtype))
    return matrix


def packed(*args: Any) -> GroupedMatrix:
    matrix = grouped(*args)
    matrix.pack()
    assert matrix.packed
    return matrix


def weights_of(kind: Quantization, dtype: torch.dtype, rows: int, group_of: Tensor) -> Tensor:
    """The numbers of `grouped` in float64, not rounded to `dtype`."""
    matrix = grouped(kind, torch.float32, rows, group_of)
    matrix.scales.copy_(grouped(kind, dtype, rows, group_of).scales)
    return matrix.dense().double()


def even(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // size


def tokens(count: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, inputs, generator=draw).to(DEVICE, dtype)


def check(found: Tensor, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> None:
    """Sums are off by float32's rounding (tensor cores truncate), and the result by half a unit in
    the last place."""
    exact = x.double() @ weights.t()
    on_gpu = 1e-5 if x.dtype == torch.float32 else 1e-4
    lost = (on_gpu if x.is_cuda else 1e-6) * x.double().norm(dim=1)[:, None] * weights.norm(dim=1)
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == x.dtype and found.shape == exact.shape
    eps = torch.finfo(x.dtype).eps
    assert ((found.double() - exact).abs() <= 0.51 * eps * exact.abs() + lost).all()


@every_kind
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_products_are_those_of_float64(
    kind: Quantization, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, inputs, size = shape
    matrix = packed(kind, dtype, rows, even(inputs, size))
    weights = weights_of(kind, dtype, rows, even(inputs, size))
    bias = tokens(1, rows, dtype, seed=2)[0]
    for count in (0, 1, 5, 16, 17, 70):
        x = tokens(count, inputs, dtype)
        check(
            matrix.linear(x, bias if count % 2 else None), x, weights, bias if count % 2 else None
        )


@every_dtype
@pytest.mark.parametrize("shape", [(100, 100), (130, 1536), (3, 8)], ids=str)
def test_int8_products_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix, weights = int8(*shape, dtype)
    bias = tokens(1, shape[0], dtype, seed=2)[0]
    for count in (0, 1, 5, 40, 70):
        x = tokens(count, shape[1], dtype)
        check(matrix.linear(x, None), x, weights)
        check(matrix.linear(x, bias, partial=True), x, weights, bias)


def test_inputs_that_many_programs_share() -> None:
    """A long sum in several parts, the last of them shorter."""
    matrix, weights = int8(8, 11008, torch.bfloat16)
    assert products._parts(8, 11008 // 128) == 16
    x, bias = tokens(5, 11008, torch.bfloat16), tokens(1, 8, torch.bfloat16)[0]
    check(matrix.linear(x, bias), x, weights, bias)


def int8(rows: int, inputs: int, dtype: torch.dtype) -> tuple[Int8Matrix, Tensor]:
    """Returns a random matrix, and its weights in float64."""
    dense = tokens(rows, inputs, dtype, seed=0)
    matrix = Int8Matrix.rounded_of(dense, dense.abs().amax(1), kernels())
    return matrix, matrix.values.double() * matrix.scales.double()[:, None]


@every_kind
def test_inputs_in_any_order(kind: Quantization) -> None:
    """`desc_act`: the inputs are sorted by group when the matrix is packed."""
    draw = torch.Generator().manual_seed(3)
    group_of = even(256, 32)[torch.randperm(256, generator=draw)]
    before = grouped(kind, torch.float32, 40, group_of)
    matrix = packed(kind, torch.float32, 40, group_of)
    assert torch.equal(matrix.dense(), before.dense()) and matrix.nbytes == before.nbytes
    x = tokens(5, 256, torch.float32)
    check(matrix.linear(x, None), x, before.dense().double())


@every_kind
def test_packed_matrices_are_joined(kind: Quantization) -> None:
    parts = [packed(kind, torch.float32, rows, even(64, 32)) for rows in (24, 40)]
    whole = grouped(kind, torch.float32, 64, even(64, 32))
    whole.take(parts)
    assert whole.packed
    assert torch.equal(whole.dense(), torch.cat([each.dense() for each in parts]))
    x = tokens(3, 64, torch.float32)
    check(whole.linear(x, None), x, whole.dense().double())


@pytest.mark.parametrize("first", [32, 64, 96])
def test_a_rank_s_inputs_may_begin_within_a_group(first: int) -> None:
    kind, group_of = KINDS["4 bits"], torch.arange(first, first + 192) // 128
    matrix = packed(kind, torch.float32, 24, group_of)
    x = tokens(3, 192, torch.float32)
    check(matrix.linear(x, None), x, matrix.dense().double())


def test_groups_that_kernels_do_not_take(caplog: pytest.LogCaptureFixture) -> None:
    """A rank has a part of `desc_act`'s groups, or they are small: dequantized as before, and said
    once."""
    grouped_matrix._warn_once.cache_clear()
    uneven = torch.tensor([0] * 32 + [1] * 5 + [2] * 11)
    for group_of, count in ((uneven, 3), (even(64, 8), 8), (even(48, 16), 9)):
        matrix = grouped(KINDS["4 bits"], torch.float32, 16, group_of, count)
        with caplog.at_level(logging.WARNING):
            matrix.pack()
        assert not matrix.packed
        x = tokens(3, len(group_of), torch.float32)
        torch.testing.assert_close(matrix.linear(x, None), x @ matrix.dense().t())
    assert caplog.text.count("4-bit matrices are dequantized") == 1
    assert EvenGroups.of(uneven, 3) is None


@every_dtype
def test_tokens_may_be_part_of_wider_rows(dtype: torch.dtype) -> None:
    matrix = packed(KINDS["4 bits"], dtype, 64, even(64, 32))
    for width, first in ((150, 7), (160, 16), (160, 3)):
        x = tokens(6, width, dtype)[:, first : first + 64]
        assert torch.equal(matrix.linear(x, None), matrix.linear(x.contiguous(), None))
    rows = tokens(6, 64, dtype)
    assert torch.equal(matrix.linear(rows[::2], None), matrix.linear(rows[::2].clone(), None))
    assert torch.equal(matrix.linear(rows[1:2], None), matrix.linear(rows[1:2].clone(), None))
    assert torch.equal(matrix.linear(rows.t().clone().t(), None), matrix.linear(rows, None))


@every_dtype
@pytest.mark.parametrize("count", [16, 32, 128])
def test_a_token_is_computed_alike_among_equally_many(dtype: torch.dtype, count: int) -> None:
    matrix = packed(KINDS["4 bits"], dtype, 100, even(512, 128))
    x, other = tokens(count, 512, dtype), tokens(count, 512, dtype, seed=5) * 100
    other[3] = x[7]
    assert torch.equal(matrix.linear(x, None)[7], matrix.linear(other, None)[3])


@every_kind
def test_many_tokens_are_multiplied_by_the_dequantized_matrix(
    kind: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = packed(kind, torch.float32, 16, even(64, 32)), tokens(300, 64, torch.float32)
    launched = launches(monkeypatch, lambda: matrix.linear(x, None))
    assert len(x) > MOST_TOKENS and not launched
    check(matrix.linear(x, None), x, matrix.dense().double())


def launches(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], object]) -> list[Any]:
    """Returns what makes kernels differ: the function, its constants, which integers are 1 or
    multiples of 16, and which pointers are aligned."""
    found: list[Any] = []

    def record(kernel: Any, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        special = []
        for name, value in zip(kernel.arg_names, args, strict=False):
            if name in ("tokens", "count"):  # `do_not_specialize`
                continue
            number = value.data_ptr() if isinstance(value, Tensor) else value
            special.append(None if value is None else (number == 1, number % 16 == 0))
        found.append((kernel.fn.__name__, tuple(special), tuple(sorted(constants.items()))))

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_run", record)
        compute()
    return found


def test_a_warm_up_uses_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles anew for other constants, for integers that are 1 or multiples of 16, and for
    unaligned pointers. No number of tokens after the warm-up may need that."""
    for kind, inputs in pairs(KINDS.values(), (96, 256)):
        matrix = packed(kind, torch.bfloat16, 4096, even(inputs, 32))

        def run(count: int, matrix: GroupedMatrix = matrix, inputs: int = inputs) -> set[Any]:
            wide = torch.empty(count + 1, inputs + 8, dtype=torch.bfloat16, device=DEVICE)
            found: set[Any] = set()
            for x in (wide[:-1, :inputs], wide[1:, 3 : inputs + 3], wide[:-1, :inputs].clone()):
                found.update(launches(monkeypatch, lambda x=x: matrix.linear(x, None)))
            return found

        warm = {each for count in TOKENS for each in run(count)}
        assert GpuProducts.token_counts == TOKENS and len(warm) >= len(TOKENS)
        for count in (1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 127, 129, 144, 255, MOST_TOKENS):
            assert run(count) <= warm


def test_few_programs_share_inputs_and_add_in_order() -> None:
    assert products._parts(28672, 100) == 1
    assert products._parts(4096, 64) * 4096 // 64 >= 256
    assert products._parts(64, 8) == 2 and products._parts(64, 7) == 1


@models_on_cpu
@pytest.mark.parametrize(
    "scheme",
    ["int8", *(pytest.param(s, marks=pytest.mark.slow) for s in ("desc_act", "awq", "8 bits"))],
)
def test_models_with_the_kernels_equal_models_without(scheme: str, tmp_path: Path) -> None:
    folder, rounds = MODELS / "llama-gqa", "int8" if scheme == "int8" else None
    if not rounds:
        kinds = {
            "awq": Scheme("awq", group_size=32),
            "desc_act": Scheme("gptq", desc_act=True),
            "8 bits": Scheme("gptq", bits=8),
        }
        folder = quantize_folder(folder, tmp_path / "quantized", kinds[scheme])
    batch = [(some_tokens(40), 0, [4, 2, 6])]
    plain, ours = (load(folder, kernels=each, quantization=rounds) for each in ("torch", kernels()))
    expected, found = (step(model, new_cache(model), batch) for model in (plain, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ours.weights_bytes == plain.weights_bytes
    check_split(folder, rounds)


def check_split(folder: Path, rounds: str | None = None) -> None:
    whole = split_logits(1, lambda rank: load(folder, rank, "torch", None, rounds))[0]
    for part in split_logits(2, lambda rank: load(folder, rank, kernels(), None, rounds)):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)
