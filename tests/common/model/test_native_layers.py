"""A stage's layers in one native call: the bits of the layers one by one, for all that it computes,
and the layers one by one for the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crowd import Crowd
from paths import MODELS
from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import Kernels, TorchKernels
from pdserve.common.model.layers import LoRA
from pdserve.common.model.native_layers import NativeLayers
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from tiny_engine import BLOCK_SIZE, CPU, new_cache, some_tokens, step
from windowed import make_windowed

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here"),
]

NATIVE = NativeKernels()
AWQ = Quantization("awq", 4, group_size=32)
GPTQ = Quantization("gptq", 8, group_size=64, zero_offset=1)
SYMMETRIC = Quantization("compressed-tensors", 4, group_size=32, zero_offset=8, symmetric=True)
INT8 = Quantization("int8", 8)
LONG, SHORT = some_tokens(60), some_tokens(12, seed=1)
# Each step: (tokens, start, block table) of its sequences. The first one is the smallest.
STEPS = [
    [(SHORT[:1], 0, [7, 3])],
    [(LONG[:57], 0, [5, 0, 2, 9]), (SHORT[1:9], 1, [7, 3])],
    [(LONG[57:58], 57, [5, 0, 2, 9]), (SHORT[9:10], 9, [7, 3])],
    [(LONG[58:], 58, [5, 0, 2, 9])],
]


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return replace(ModelSpec.from_folder(MODELS / name), **changes)


def filled(model: CausalLM) -> CausalLM:
    """Fills the weights with random numbers, as loading does."""
    draw = torch.Generator().manual_seed(0)
    shards = list(model.shards())
    for shard in shards:
        target = shard.target
        if not target.is_floating_point():
            target.random_(0, 127, generator=draw)
        elif "norm" in shard.name:
            target.uniform_(0.5, 1.5, generator=draw)
        elif model.spec.quantization is not None and target.shape[-1] < 32:
            target.uniform_(0.001, 0.01, generator=draw)  # of groups
        else:
            target.uniform_(-0.2, 0.2, generator=draw)
    for shard in shards:
        shard.finish()
    model.loaded()
    return model


def built(
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
    kernels: Kernels = NATIVE,
    stage: Stage | None = None,
    kv_cache_dtype: str = KV_AUTO,
) -> CausalLM:
    group = group or GroupCoordinator()
    sharding = Sharding(group, CPU, dtype, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
    return filled(CausalLM(spec, sharding, stage))


def computed(model: CausalLM) -> list[torch.Tensor]:
    """Returns the logits of all steps, and the caches after them."""
    caches = new_cache(model)
    found = [step(model, caches, sequences) for sequences in STEPS]
    assert all(bool(logits.isfinite().all()) for logits in found)
    return found + caches


def check(model: CausalLM, calls: int = 1) -> None:
    """Compares the steps of `model` with those of its layers one by one."""
    together, model.native_layers = model.native_layers, None
    assert together is not None and len(together.calls) == calls
    expected = computed(model)
    assert len(expected[0].unique()) > 100  # the weights are not all alike
    model.native_layers = together
    for one, other in zip(computed(model), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, INT8, AWQ, GPTQ, SYMMETRIC])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])
def test_a_call_has_the_bits_of_single_layers(
    name: str, kind: Quantization | None, dtype: torch.dtype
) -> None:
    """With biases and head norms."""
    check(built(spec_of(name, quantization=kind), dtype))


def test_biases_of_all_layers() -> None:
    spec = spec_of("llama-gqa", qkv_bias=True, o_bias=True, mlp_bias=True)
    check(built(spec, torch.bfloat16))


@pytest.mark.parametrize("name", ["mistral", "ministral", "qwen3"])
def test_windows(name: str, tmp_path: Path) -> None:
    """In one or two KV groups."""
    check(built(ModelSpec.from_folder(make_windowed(name, tmp_path))))


def test_chunked_attention() -> None:
    spec = spec_of("llama-gqa")
    model = CausalLM(spec, Sharding(GroupCoordinator(), CPU, torch.float32, kernels=NATIVE))
    (attention,) = model.attentions
    attention.shape = replace(attention.shape, window=24, chunked=True)
    check(filled(model))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_kv_of_eight_bits(kv_cache_dtype: str) -> None:
    check(built(spec_of("llama-gqa"), torch.bfloat16, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize(("name", "calls"), [("mixtral", 4), ("qwen2-moe", 3)])
def test_python_computes_experts_between_two_calls(name: str, calls: int) -> None:
    check(built(spec_of(name), torch.bfloat16), calls)


def test_a_stage_whose_dense_layer_follows_experts() -> None:
    spec = spec_of("qwen2-moe")
    assert spec.is_sparse(0) and not spec.is_sparse(1)
    model, batch = built(spec, stage=Stage(0, 2, last=False)), AttentionBatch([3], [0], [[3]], 16)
    contexts, caches = model.prepare([batch]), new_cache(model)

    def forward() -> torch.Tensor:
        return model.forward(torch.tensor([5, 6, 7]), torch.arange(3), contexts, caches)

    assert model.native_layers is not None and len(model.native_layers.calls) == 2
    found = forward()
    model.native_layers = None
    assert torch.equal(found, forward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_python_adds_up_the_sums_of_ranks(name: str, dtype: torch.dtype) -> None:
    """Two halves of each layer; a bias of the output is added once."""
    spec = spec_of(name, o_bias=True, mlp_bias=True)

    def work(member: Any) -> torch.Tensor:
        model = built(spec, dtype, member)
        check(model, 2 * spec.num_layers)
        return computed(model)[1]

    one, other = Crowd(2).run(work)
    assert torch.equal(one, other)


def test_a_later_stage_leaves_its_inputs_as_they_are() -> None:
    model = built(spec_of("llama-gqa"), stage=Stage(2, 4, first=False, last=False))
    caches, inputs = new_cache(model), torch.randn(5, model.spec.hidden_size)
    before = inputs.clone()
    contexts = model.prepare([AttentionBatch([5], [0], [[3]], BLOCK_SIZE)])

    def forward() -> torch.Tensor:
        return model.forward(inputs, torch.arange(5), contexts, caches)

    assert model.native_layers is not None
    found = forward()
    model.native_layers = None
    assert torch.equal(found, forward()) and torch.equal(inputs, before)


def test_results_outlive_the_next_step() -> None:
    model = built(spec_of("llama-gqa"))
    caches = new_cache(model)
    contexts = model.prepare([AttentionBatch([1], [0], [[3]], BLOCK_SIZE)])
    first = model.forward(torch.tensor([5]), torch.tensor([0]), contexts, caches)
    kept = first.clone()
    second = model.forward(torch.tensor([6]), torch.tensor([0]), contexts, caches)
    assert torch.equal(first, kept) and not torch.equal(first, second)


class Adapter(LoRA):
    """Adds nothing, and counts the products."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor, group: Any = None) -> None:
        self.count += 1


def test_a_step_with_adapters_computes_the_layers_one_by_one() -> None:
    model, adapter = built(spec_of("llama-gqa")), Adapter()
    contexts = model.prepare([AttentionBatch([1], [0], [[3]], BLOCK_SIZE)])
    model.forward(torch.tensor([5]), torch.tensor([0]), contexts, new_cache(model), adapter)
    assert adapter.count == 4 * model.spec.num_layers


def of_act_order() -> CausalLM:
    return built(spec_of("llama-gqa", quantization=replace(GPTQ, desc_act=True)))


def of_latents(folder: Path) -> CausalLM:
    return built(ModelSpec.from_folder(make_windowed("deepseek", folder)))


@pytest.mark.parametrize(
    "build",
    [
        lambda folder: built(spec_of("llama-gqa"), kernels=TorchKernels()),
        lambda folder: built(spec_of("llama-gqa"), torch.float16),
        lambda folder: built(spec_of("llama-gqa"), stage=Stage(1, 1, first=False)),
        lambda folder: of_act_order(),
        of_latents,
    ],
    ids=["torch", "float16", "no layer", "act order", "latents"],
)
def test_layers_one_by_one_compute_the_rest(
    build: Callable[[Path], CausalLM], tmp_path: Path
) -> None:
    assert build(tmp_path).native_layers is None


def test_rows_that_are_padded_stay_layers_one_by_one(tmp_path: Path) -> None:
    """A product's result has the padding rows, too; another copy would remove them."""
    spec = spec_of("llama-gqa", intermediate_size=40)
    assert built(spec).native_layers is None
    assert isinstance(built(replace(spec, intermediate_size=48)).native_layers, NativeLayers)
