"""FP8 and INT8 checkpoints that keep 8 bits in a GPU's memory: the weights and products are those
of the dequantized model. In Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stored_weights import Held
from test_triton_products import check, check_split, every_dtype, kernels, models_on_cpu, tokens
from torch import Tensor

from interpreted import DEVICE
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.stored_weights import StoredWeights, weight_formats
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model import scaled_weight
from pdserve.common.model.dequantize import dequantized
from pdserve.common.model.kernels.gpu import products
from pdserve.common.model.kernels.quantized import Quantized
from pdserve.common.model.loader import load_model
from pdserve.common.model.scaled_weight import ScaledWeight
from pdserve.common.model.sharding import MatrixPart, Sharding
from pdserve.common.model.stages import Stage
from pdserve.common.model.weights import make_weight
from pdserve.common.planning.footprint import Footprint
from stored_folders import SCALED, folders, scaled
from tiny_engine import load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")


@every_dtype
def test_every_e4m3_number_is_converted_exactly(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE)[None].clone()
    values[:, [127, 255]] = 0  # NaN
    matrix = Quantized("e4m3", values, torch.ones(1, 1, device=DEVICE), 256)
    found = products.product(torch.eye(256, dtype=dtype, device=DEVICE), matrix)
    assert torch.equal(found[:, 0].float(), values[0].view(torch.float8_e4m3fn).float())


@models_on_cpu
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("blocks", "llama-gqa"),
        *(pytest.param(k, "llama-gqa", marks=pytest.mark.slow) for k in SCALED if k != "blocks"),
        pytest.param("blocks", "mixtral", marks=pytest.mark.slow),
    ],
)
def test_stored_8_bits_stay_in_linear_layers(kind: str, name: str, tmp_path: Path) -> None:
    """With the weights of the dequantized model, bit by bit. Experts are dequantized."""
    settings = SCALED[kind]
    made = folders(MODELS / name, tmp_path / "a", settings, lambda matrix, _: scaled(matrix, kind))
    plain, ours = (load(made, kernels=each) for each in ("torch", kernels()))
    for layer, expected in zip(ours.layers, plain.layers, strict=True):
        for found, right in zip(linears(layer), linears(expected), strict=True):
            assert isinstance(found, ScaledWeight)
            assert torch.equal(found.dense(), right.dense())
    batch = [(some_tokens(20), 0, [4, 2, 6])]
    right, found = (step(model, new_cache(model), batch) for model in (plain, ours))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    spec = ModelSpec.from_folder(made).on_gpus()
    planned = Footprint(spec, "float32").weights(Stage.whole(spec.num_layers))
    assert planned == ours.weights_bytes < plain.weights_bytes
    if kind in ("blocks", "compressed-int8") and name == "llama-gqa":
        check_split(made)


def linears(layer: Any) -> Iterator[Any]:
    for module in (layer.attention.qkv_proj, layer.attention.o_proj):
        yield module.weight
    if hasattr(layer.mlp, "down_proj"):
        yield layer.mlp.gate_up_proj.weight
        yield layer.mlp.down_proj.weight


@pytest.mark.parametrize("columns", [slice(0, 96), slice(48, 96), slice(40, 72)], ids=str)
def test_ranks_cut_blocks(columns: slice, caplog: pytest.LogCaptureFixture) -> None:
    """Where kernels do not take a cut, the part is dequantized."""
    scaled_weight._warn_once.cache_clear()
    tensors, dense = scaled(tokens(64, 96, torch.float32).cpu(), "blocks")
    part = MatrixPart("a", (64, 96), slice(16, 56), columns)
    kind = StoredWeights("FP8", (48, 32)).kept
    sharding = Sharding(
        GroupCoordinator(), DEVICE, torch.float32, quantization=kind, kernels=kernels()
    )
    with caplog.at_level(logging.WARNING):
        weight = make_weight([part], sharding)
    assert isinstance(weight, ScaledWeight)
    held = {f"a.{name}": Held(tensor) for name, tensor in tensors.items()}
    view = dequantized(held, StoredWeights("FP8", (48, 32)), kind)
    for shard in weight.shards():
        assert tuple(view[shard.name].get_shape()) == shard.shape
        shard.target.copy_(shard.convert(view[shard.name][shard.index]))
    assert torch.equal(weight.dense().cpu(), dense[16:56, columns])
    x = tokens(3, columns.stop - columns.start, torch.float32)
    check(weight.linear(x, None), x, weight.dense().double())
    assert ("8-bit matrices are dequantized" in caplog.text) == (columns.start == 40)


@models_on_cpu
def test_weights_that_are_not_as_said(tmp_path: Path) -> None:
    def write(layer: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tensors, dense = scaled(layer, "per-tensor")
        tensors["weight"].view(torch.uint8)[0, 0] = 0x7F
        return tensors, dense

    made = folders(MODELS / "llama-gqa", tmp_path / "a", SCALED["per-tensor"], write)
    with pytest.raises(ConfigError, match=r"not numbers \(NaN\)"):
        load(made, kernels=kernels())
    plain = tmp_path / "plain"
    shutil.copytree(MODELS / "llama-gqa", plain)
    config = json.loads((plain / "config.json").read_text())
    settings = {"quantization_config": SCALED["per-tensor"]}
    (plain / "config.json").write_text(json.dumps(config | settings))
    assert load(plain)
    with pytest.raises(ConfigError, match=r"missing: .*down_proj.weight#numbers"):
        load(plain, kernels=kernels())


def test_dummy_weights_of_8_bits(tmp_path: Path) -> None:
    settings = SCALED["blocks"]
    made = folders(MODELS / "llama-gqa", tmp_path / "a", settings, lambda m, _: scaled(m, "blocks"))
    spec = ModelSpec.from_folder(made)
    sharding = Sharding(GroupCoordinator(), DEVICE, torch.float32, kernels=kernels())
    model = load_model(spec, ModelConfig(load_format="dummy"), sharding)
    weights = next(linears(model.layers[0]))
    assert isinstance(weights, ScaledWeight) and weights.dense().isfinite().all()


def test_modules_that_are_not_quantized() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.k_proj"]}
    stored = weight_formats(config)[1]
    assert stored is not None and (kept := stored.kept) is not None
    assert not kept.covers("model.layers.0.self_attn.k_proj") and not kept.covers("lm_head")
    assert kept.covers("model.layers.0.self_attn.q_proj")
    assert not kept.covers("model.layers.0.mlp.experts.3.up_proj")
    assert StoredWeights("MXFP4").kept is None
