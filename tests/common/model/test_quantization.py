"""Quantized weights: what files say, what stays in memory, and what is computed from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_model import split_logits
from torch import Tensor

from benchmarks.quantized_folder import Scheme, load_weights, quantize_folder, quantize_matrix
from paths import MODELS
from pdserve.common.config.engine import EngineConfig, ModelConfig, ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.expert_weights import QuantizedExperts
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.loader import load_model
from pdserve.common.model.moe import MoE
from pdserve.common.model.sharding import MatrixPart, Sharding
from pdserve.common.model.weights import Int8Weight, Weight, make_weight
from pdserve.common.node.model_facts import ModelFacts
from slow_quantization import dequantize, dequantized_folder
from tiny_engine import CPU, load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

LLAMA = MODELS / "llama-gqa"
SCHEMES = {
    "awq": Scheme("awq", group_size=64),
    "awq-skipping": Scheme("awq", skipped=("self_attn.o_proj", "mlp.down_proj")),
    "gptq": Scheme("gptq", sym=True),
    "gptq-one-group": Scheme("gptq", group_size=-1, v2=True),
    "gptq-desc-act": Scheme("gptq", desc_act=True),
    "gptq-8-bits": Scheme("gptq", bits=8, group_size=64),
    "gptq-skipping": Scheme("gptq", v2=True, skipped=("self_attn.o_proj",)),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the tiny Llama: the slow reader takes its time."""
    folder = tmp_path_factory.mktemp("shallow")
    config = json.loads((LLAMA / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {
        name: tensor
        for name, tensor in load_weights(LLAMA).items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(kept, folder / "model.safetensors")
    return folder


# ---- one matrix ----


def filled(weight: Weight, tensors: Mapping[str, Tensor]) -> Weight:
    """Fills it as the loader does."""
    for shard in weight.shards():
        assert tuple(tensors[shard.name].shape) == shard.shape
        shard.target.copy_(shard.convert(tensors[shard.name][shard.index]))
    return weight


def grouped(parts: list[MatrixPart], scheme: Scheme) -> GroupedWeight:
    sharding = Sharding(
        GroupCoordinator(), CPU, torch.float32, quantization=Quantization.from_config(scheme.config)
    )
    weight = make_weight(parts, sharding)
    assert isinstance(weight, GroupedWeight)
    return weight


def tensors_of(matrices: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": tensor
        for seed, (name, matrix) in enumerate(matrices.items())
        for kind, tensor in quantize_matrix(matrix, scheme, seed).items()
    }


@every_scheme
@pytest.mark.parametrize("cut", [1, 2, 4, 8])
def test_parts_of_a_matrix_are_those_of_the_slow_reader(scheme: Scheme, cut: int) -> None:
    """Cuts of outputs and of inputs, also where they split words (10 outputs) and groups (24 and
    12 inputs): every bit is the same."""
    scheme = replace(scheme, skipped=())
    matrices = {"a": torch.randn(80, 96), "b": torch.randn(40, 96)}
    tensors = tensors_of(matrices, scheme)
    slow = {name: dequantize(tensors, name, scheme) for name in matrices}

    def part(name: str, rows: slice, columns: slice) -> MatrixPart:
        return MatrixPart(name, tuple(matrices[name].shape), rows, columns)

    for rank in range(cut):
        rows = {name: share(len(matrix), rank, cut) for name, matrix in matrices.items()}
        parts = [part(name, rows[name], slice(0, 96)) for name in matrices]
        column_parallel = filled(grouped(parts, scheme), tensors)
        expected = torch.cat([slow[name][rows[name]] for name in matrices])
        assert torch.equal(column_parallel.dense(), expected)

        columns = share(96, rank, cut)
        row_parallel = filled(grouped([part("a", slice(0, 80), columns)], scheme), tensors)
        assert torch.equal(row_parallel.dense(), slow["a"][:, columns])
        assert row_parallel.matrices[0].values.nbytes == 80 * (96 // cut) * scheme.bits // 8


def share(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


def int8(matrix: Tensor, columns: slice, dtype: torch.dtype = torch.float32) -> Int8Weight:
    kind = Quantization("int8", 8)
    sharding = Sharding(GroupCoordinator(), CPU, dtype, quantization=kind)
    part = MatrixPart("a", tuple(matrix.shape), slice(0, len(matrix)), columns)
    weight = filled(make_weight([part], sharding), {"a.weight": matrix})
    assert isinstance(weight, Int8Weight)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_within_half_a_step_of_each_channel(dtype: torch.dtype) -> None:
    matrix = torch.randn(64, 96) * torch.logspace(-3, 1, 64)[:, None]
    matrix[5] = 0
    weight = int8(matrix, slice(0, 96), dtype)
    steps = weight.scales.float()
    assert torch.allclose(steps, (matrix.abs().amax(1) / 127).masked_fill(steps == 1, 1), rtol=0.01)
    error = (weight.values * steps[:, None] - matrix).abs().amax(1)
    assert (error <= steps * 0.5001).all()
    assert weight.values[5].eq(0).all()
    assert weight.values.abs().amax(1).min() == 0 and weight.values.abs().amax() == 127
    parts = [int8(matrix, share(96, rank, 4), dtype) for rank in range(4)]
    assert torch.equal(torch.cat([part.values for part in parts], 1), weight.values)
    assert all(torch.equal(part.scales, weight.scales) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_int8_product(dtype: torch.dtype) -> None:
    """Sums of thousands, which times 127 are beyond half precision."""
    matrix, x, bias = torch.rand(8, 512), torch.full((3, 512), 20.0), torch.arange(8.0)
    out = int8(matrix, slice(0, 512), dtype).linear(x.to(dtype), bias.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), x @ matrix.t() + bias, rtol=0.01, atol=0.01)


# ---- whole models ----


def logits(model: CausalLM) -> Tensor:
    return step(model, new_cache(model), [(some_tokens(40), 0, [4, 2, 6])])


@every_scheme
def test_logits_are_those_of_dequantized_weights(
    scheme: Scheme, shallow: Path, tmp_path: Path
) -> None:
    folder = quantize_folder(shallow, tmp_path / "quantized", scheme)
    dense = logits(load(dequantized_folder(folder, tmp_path / "dense", scheme)))
    torch.testing.assert_close(logits(load(folder)), dense, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(logits(load(folder, kernels="auto")), dense, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])
@pytest.mark.parametrize("scheme", ["awq", "gptq-desc-act", "gptq-8-bits"])
@pytest.mark.parametrize("size", [2, 4])  # of 4, groups of 64 are split
def test_a_split_quantized_model_equals_the_whole(
    name: str, scheme: str, size: int, tmp_path: Path
) -> None:
    folder = quantize_folder(MODELS / name, tmp_path / "quantized", SCHEMES[scheme])
    check_split(size, lambda member: load(folder, member, "auto"))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8_rounds_the_head_and_an_embedding_tied_to_it(name: str, kernels: str) -> None:
    folder, kind = MODELS / name, choose_kernels(kernels, CPU)
    config = ModelConfig(model=str(folder), quantization="int8")
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32, kernels=kind)
    exact, model = load(folder), load_model(ModelSpec.from_folder(folder), config, sharding)
    (head, table), (rounded, looked_up) = (
        (each.head.lm_head.weight.dense(), each.embedding)  # type: ignore[union-attr]
        for each in (exact, model)
    )
    assert table is not None and looked_up is not None and model.head is not None
    steps = head.abs().amax(1, keepdim=True) / 127
    assert not torch.equal(rounded, head) and ((rounded - head).abs() <= steps * 0.5001).all()
    x, ids = torch.randn(3, head.shape[1]), torch.tensor([5, 0, len(head) - 1])
    torch.testing.assert_close(model.head.lm_head(x), x @ rounded.t(), rtol=1e-4, atol=1e-4)
    tied = model.spec.tie_word_embeddings
    torch.testing.assert_close(looked_up(ids), rounded[ids] if tied else table(ids))


MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe"]


@pytest.mark.parametrize("name", MIXTURES)
def test_int8_rounds_experts_too(name: str, tmp_path: Path) -> None:
    """All matrices but routers, gates and embeddings that are not tied."""
    shutil.copyfile(MODELS / name / "config.json", tmp_path / "config.json")
    weights: dict[str, Tensor] = load_weights(MODELS / name)
    kept: tuple[str, ...] = (".gate.weight", "_gate.weight", "norm.weight", "bias")
    tied = "lm_head.weight" not in weights
    kept = kept if tied else (*kept, "embed_tokens.weight")
    rounded = {
        key: matrix if key.endswith(kept) else round_channels(matrix)
        for key, matrix in weights.items()
    }
    save_file(rounded, tmp_path / "model.safetensors")
    model = load(MODELS / name, quantization="int8")
    assert isinstance(model.layers[-1].mlp, MoE)
    assert isinstance(model.layers[-1].mlp.experts.down_proj, QuantizedExperts)
    torch.testing.assert_close(logits(model), logits(load(tmp_path)), rtol=1e-4, atol=1e-4)


def round_channels(matrix: Tensor) -> Tensor:
    steps = matrix.float().abs().amax(1, keepdim=True) / 127
    return (matrix.float() / steps).round() * steps


@pytest.mark.parametrize("name", MIXTURES)
def test_a_split_int8_mixture_equals_the_whole(name: str) -> None:
    check_split(2, lambda member: load(MODELS / name, member, quantization="int8"))


def check_split(size: int, build: Callable[[Any], CausalLM]) -> None:
    whole = split_logits(1, build)[0]
    for part in split_logits(size, build):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


# ---- refusals ----

AWQ = Scheme("awq").config
GPTQ = Scheme("gptq").config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quark"}, "quant_method 'quark'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors config_groups"),
        ({"bits": 4}, "quant_method None"),
        ({**AWQ, "bits": 8}, "awq bits 8"),
        ({**AWQ, "version": "gemv"}, "awq version 'gemv'"),
        ({**AWQ, "zero_point": False}, "awq zero_point False"),
        ({**GPTQ, "bits": 3}, "gptq bits 3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "group_size": 0}, "group_size 0"),
        ({**GPTQ, "lm_head": True}, "lm_head True"),
        ({**GPTQ, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic"),
    ],
)
def test_other_formats_are_refused(config: dict[str, Any], message: str) -> None:
    raw = json.loads((LLAMA / "config.json").read_text())
    with pytest.raises(ConfigError, match=rf"{message}.*AWQ.*GPTQ.*--quantization int8"):
        ModelSpec.from_config({**raw, "quantization_config": config})


def test_modules_are_named_by_whole_components() -> None:
    kind = Quantization.from_config({**AWQ, "modules_to_not_convert": ["mlp.gate", "lm_head"]})
    assert kind.covers("model.layers.0.mlp.gate_proj")
    assert not kind.covers("model.layers.0.mlp.gate")
    kind = Quantization.from_config({**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}}})
    assert kind.covers("model.layers.0.mlp.gate_proj")
    assert not kind.covers("model.layers.0.mlp.gate")


def test_int8_is_not_put_on_top(tmp_path: Path) -> None:
    folder = quantize_folder(LLAMA, tmp_path / "awq", Scheme("awq"))
    with pytest.raises(ConfigError, match=r"--quantization int8 .*quantized \(awq\): leave"):
        load(folder, quantization="int8")
    spec = ModelSpec.from_folder(folder)
    dummy = ModelConfig(model=str(folder), load_format="dummy")
    with pytest.raises(ConfigError, match="dummy cannot make awq weights"):
        load_model(spec, dummy, Sharding(GroupCoordinator(), CPU, torch.float32))


def test_a_checkpoint_s_own_format_may_be_named(tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(quantize_folder(LLAMA, tmp_path / "awq", Scheme("awq")))
    assert spec.quantized("awq") == spec.quantized("awq_marlin") == spec
    with pytest.raises(ConfigError, match=r"--quantization gptq .* says: its format is awq"):
        spec.quantized("gptq")
    with pytest.raises(ConfigError, match=r"--quantization fp8 .*not quantized, for which .* int8"):
        ModelSpec.from_folder(LLAMA).quantized("fp8")


def test_dummy_weights_can_be_int8() -> None:
    config = ModelConfig(load_format="dummy", quantization="int8")
    spec = ModelSpec.from_folder(LLAMA)
    model = load_model(spec, config, Sharding(GroupCoordinator(), CPU, torch.float32))
    assert model.layers[0].mlp.down_proj.weight.values.abs().amax(1).eq(127).all()


Edit = Callable[[dict[str, Tensor]], object]
PREFIX = "model.layers.0.mlp.down_proj"


def edited(folder: Path, scheme: Scheme, edit: Edit) -> Path:
    quantize_folder(LLAMA, folder, scheme)
    weights = load_weights(folder)
    edit(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        del weights[f"{PREFIX}.qzeros"]
        weights[f"{PREFIX}.scales"] = torch.zeros(5, 128)
        weights[f"{PREFIX}.bias"] = torch.ones(128)

    with pytest.raises(ConfigError) as caught:
        load(edited(tmp_path / "wrong", Scheme("gptq"), edit))
    message = caught.value.message
    assert f"missing: {PREFIX}.qzeros" in message
    assert f"unexpected: {PREFIX}.bias" in message
    assert f"{PREFIX}.scales [5, 128] ≠ [10, 128]" in message


def test_zero_biases_of_autogptq_are_ignored(tmp_path: Path) -> None:
    name = f"{PREFIX}.bias"
    load(edited(tmp_path / "zero", Scheme("gptq"), lambda w: w.update({name: torch.zeros(128)})))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("g_idx", torch.full((320,), 10, dtype=torch.int32), "g_idx has group ids beyond the 10"),
        ("qweight", torch.zeros(40, 128), "qweight has dtype torch.float32"),
    ],
)
def test_contents_that_make_no_sense(
    name: str, value: Tensor, message: str, tmp_path: Path
) -> None:
    scheme = Scheme("gptq", desc_act=True)
    with pytest.raises(ConfigError, match=message):
        load(edited(tmp_path / "odd", scheme, lambda w: w.update({f"{PREFIX}.{name}": value})))


def test_one_product_is_quantized_alike() -> None:
    kind = Quantization("awq", 4, 32, excluded=("v_proj",))
    spec = replace(ModelSpec.from_folder(LLAMA), quantization=kind)
    with pytest.raises(ConfigError, match=r"q_proj.*v_proj are fused"):
        CausalLM(spec, Sharding(GroupCoordinator(), CPU, torch.float32))


def test_numbers_fill_words_and_bytes() -> None:
    spec = ModelSpec.from_folder(LLAMA).quantized("int4")
    ranks: Any = SimpleNamespace(rank=0, size=4)
    with pytest.raises(ConfigError, match="does not fill whole 32-bit words"):
        CausalLM(
            replace(spec, intermediate_size=324),
            Sharding(GroupCoordinator(), CPU, torch.float32),
        )
    with pytest.raises(ConfigError, match="--tensor-parallel-size leaves a rank 9 inputs"):
        make_weight(
            [MatrixPart("a", (128, 72), slice(0, 128), slice(0, 9))],
            Sharding(ranks, CPU, torch.float32, quantization=spec.quantization),
        )


# ---- pairing ----


def identity(folder: Path, **options: Any) -> dict[str, str]:
    engine = EngineConfig(
        model=ModelConfig(model=str(folder), **options), parallel=ParallelConfig(device="cpu")
    )
    return ModelFacts.read(engine).kv_identity(16)


def test_other_weights_are_another_identity(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(LLAMA, folder)
    plain, rounded = identity(folder), identity(folder, quantization="int8")
    assert {key for key in plain if plain[key] != rounded[key]} == {"quantization"}
    assert rounded["quantization"] == "int8"
    awq = identity(quantize_folder(LLAMA, tmp_path / "awq", Scheme("awq")))
    assert awq["quantization"] == "awq" and awq["weights"] != plain["weights"]
