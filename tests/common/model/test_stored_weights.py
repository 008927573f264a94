"""Checkpoints that are dequantized while they are loaded: every weight is bit by bit that of a
plain reader here, and the logits are those of transformers with these weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_model import split_logits
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.quantized_folder import Scheme, load_weights, quantize_matrix
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.stored_weights import MXFP4, StoredWeights
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.dequantize import dequantized
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import MatrixPart, Sharding
from pdserve.common.model.stages import Stage
from pdserve.common.model.weights import make_weight
from pdserve.common.planning.footprint import Footprint
from slow_quantization import dequantize
from stored_folders import FP8, SCALED, compressed, folders, pack_quantized, scaled
from tiny_engine import CPU, load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

LLAMA, MIXTRAL = MODELS / "llama-gqa", MODELS / "mixtral"


def check_logits(folder: Path) -> None:
    """The logits are those of transformers with the dense weights, alone and split over ranks."""
    tokens = some_tokens(40)
    dense = folder.with_name(f"{folder.name}-dense")
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    expected = reference(torch.tensor([tokens])).logits[0]
    model = load(folder)
    logits = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    whole = split_logits(1, lambda member: load(folder, member))[0]
    for part in split_logits(2, lambda member: load(folder, member)):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)
    spec = ModelSpec.from_folder(folder)
    planned = Footprint(spec, "float32").weights(Stage.whole(spec.num_layers))
    assert planned == model.weights_bytes


@pytest.mark.parametrize(
    ("kind", "source"),
    [*((kind, LLAMA) for kind in SCALED), ("blocks", MIXTRAL), ("compressed-channel", MIXTRAL)],
)
def test_fp8_and_int8(kind: str, source: Path, tmp_path: Path) -> None:
    made = folders(source, tmp_path / "a", SCALED[kind], lambda matrix, _: scaled(matrix, kind))
    model, dense = load(made), load(made.with_name("a-dense"))
    for ours, right in zip(model.shards(), dense.shards(), strict=True):
        assert torch.equal(ours.target, right.target), ours.name
    check_logits(made)


def test_deepseek_in_blocks(tmp_path: Path) -> None:
    """Latent attention and experts, stored as DeepSeek does."""
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, initializer_range=0.2,
        vocab_size=512, max_position_embeddings=256,
    )  # fmt: skip
    with torch.inference_mode(False):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    kind = SCALED["blocks"]
    check_logits(
        folders(
            tmp_path / "plain", tmp_path / "a", kind, lambda matrix, _: scaled(matrix, "blocks")
        )
    )


@pytest.mark.parametrize(
    ("bits", "symmetric", "source"),
    [(4, True, LLAMA), (4, False, MIXTRAL), (8, True, MIXTRAL), (8, False, LLAMA)],
)
def test_pack_quantized(bits: int, symmetric: bool, source: Path, tmp_path: Path) -> None:
    settings = compressed(
        "pack-quantized",
        num_bits=bits,
        symmetric=symmetric,
        type="int",
        strategy="group",
        group_size=32,
    )
    made = folders(
        source, tmp_path / "a", settings, lambda matrix, _: pack_quantized(matrix, bits, symmetric)
    )
    spec = ModelSpec.from_folder(made)
    assert spec.quantization is not None
    matrix = torch.randn(64, 96)
    tensors, dense = pack_quantized(matrix, bits, symmetric)
    for rows, columns in (
        (slice(0, 64), slice(0, 96)),
        (slice(6, 38), slice(0, 96)),
        (slice(0, 64), slice(24, 48)),
    ):
        part = MatrixPart("a", (64, 96), rows, columns)
        sharding = Sharding(GroupCoordinator(), CPU, torch.float32, quantization=spec.quantization)
        weight = make_weight([part], sharding)
        assert isinstance(weight, GroupedWeight)
        for shard in weight.shards():
            stored = tensors[shard.name.removeprefix("a.")]
            assert tuple(stored.shape) == shard.shape
            shard.target.copy_(shard.convert(stored[shard.index]))
        assert torch.equal(weight.dense(), dense[rows, columns])
    check_logits(made)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(Scheme("awq"), marks=pytest.mark.slow),
        pytest.param(Scheme("gptq", sym=True), marks=pytest.mark.slow),
        Scheme("gptq", desc_act=True),
    ],
    ids=["awq", "gptq", "gptq-desc-act"],
)
def test_mixtures_of_awq_and_gptq(scheme: Scheme, tmp_path: Path) -> None:
    def quantize(matrix: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tensors = quantize_matrix(matrix, scheme, seed)
        named = {f"a.{part}": tensor for part, tensor in tensors.items()}
        return tensors, dequantize(named, "a", scheme)

    check_logits(folders(MIXTRAL, tmp_path / "a", scheme.config, quantize))


def test_int8_of_a_stored_fp8(tmp_path: Path) -> None:
    """--quantization rounds what was dequantized."""
    kind = SCALED["blocks"]
    made = folders(LLAMA, tmp_path / "a", kind, lambda matrix, _: scaled(matrix, "blocks"))
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32)
    rounded, right = (
        load_model(
            ModelSpec.from_folder(folder),
            ModelConfig(model=str(folder), quantization="int8"),
            sharding,
        )
        for folder in (made, made.with_name("a-dense"))
    )
    for ours, expected in zip(rounded.shards(), right.shards(), strict=True):
        assert torch.equal(ours.target, expected.target)


# ---- MXFP4 ----


class Held:
    """A tensor in memory, read as one of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return {torch.uint8: "U8", FP8: "F8_E4M3"}.get(self.tensor.dtype, "F32")

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    blocks = torch.randint(0, 256, (3, 24, 4, 16), dtype=torch.uint8)
    scales = torch.randint(90, 160, (3, 24, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales).float()
    tensors = {"e.down_proj_blocks": Held(blocks), "e.down_proj_scales": Held(scales)}
    view = dequantized(tensors, StoredWeights(MXFP4))
    assert list(view) == ["e.down_proj"]
    weight = view["e.down_proj"]
    assert weight.get_shape() == [3, 128, 24]
    assert torch.equal(weight[()], expected)
    for index in (
        (slice(1, 3),),
        (slice(0, 1), slice(40, 100), slice(5, 7)),
        (slice(None), slice(64, 128)),
    ):
        assert torch.equal(weight[index], expected[index])


# ---- refusals ----


@pytest.mark.parametrize(
    ("tensors", "stored", "message"),
    [
        (
            {"a.weight": torch.zeros(4, 4).to(FP8)},
            "FP8",
            r"a.weight is F8_E4M3 but has no a.weight_",
        ),
        (
            {"a.weight": torch.zeros(4, 4).to(FP8), "a.weight_scale": torch.ones(3, 1)},
            "FP8",
            r"a.weight_scale of shape \[3, 1\] does not fit weights \[4, 4\]",
        ),
        ({"a_blocks": torch.zeros(1, 4, 2, 16)}, MXFP4, "a_blocks has no a_scales"),
        (
            {"a_blocks": torch.zeros(1, 4, 2, 16), "a_scales": torch.zeros(1, 4, 3)},
            MXFP4,
            "do not fit",
        ),
    ],
)
def test_scales_that_do_not_fit(tensors: dict[str, Tensor], stored: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dequantized({name: Held(each) for name, each in tensors.items()}, StoredWeights(stored))


def test_an_expert_without_its_scales(tmp_path: Path) -> None:
    scheme = Scheme("awq")
    made = folders(
        MIXTRAL,
        tmp_path / "a",
        scheme.config,
        lambda matrix, seed: (quantize_matrix(matrix, scheme, seed), matrix),
    )
    weights = load_weights(made)
    del weights["model.layers.0.block_sparse_moe.experts.1.w2.scales"]
    save_file(weights, made / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: .*experts\.1\.w2\.scales"):
        load(made)


def test_bitsandbytes_is_refused_with_the_way_round() -> None:
    raw = json.loads((LLAMA / "config.json").read_text())
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ConfigError, match=r"bitsandbytes.*--quantization int8"):
        ModelSpec.from_config({**raw, "quantization_config": settings})
