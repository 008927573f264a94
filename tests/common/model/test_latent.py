"""Attention over latents, and the models that have it, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    YoutuConfig,
)

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.latent_spec import LatentSpec
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.attention import AttentionBatch, AttentionShape
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.latent import LatentBackend, UpProjection
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint
from tiny_engine import BLOCK_SIZE, load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
CONFIGS = {
    "v2-lite": DeepseekV2Config(**SMALL, **EXPERTS, q_lora_rank=None, first_k_dense_replace=1),
    "v2": DeepseekV2Config(
        **SMALL,
        **EXPERTS,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "v3": DeepseekV3Config(
        **SMALL, **EXPERTS, q_lora_rank=24, n_group=4, topk_group=2, first_k_dense_replace=1
    ),
    "v3-bias": DeepseekV3Config(
        **SMALL,
        **EXPERTS,
        q_lora_rank=24,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        attention_bias=True,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "glm": Glm4MoeLiteConfig(**SMALL, **EXPERTS, q_lora_rank=24),
    "youtu": YoutuConfig(**SMALL, q_lora_rank=24),
}


def save(config: Any, folder: Path) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (tensor.ndim == 1 and "inv_freq" not in name) or "gate" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)  # what starts as 0 or 1 must show
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    """A prompt at once, then in a chunk after a context and tokens one by one."""
    tokens = some_tokens(40, vocab=101)
    expected = save(CONFIGS[name], tmp_path)(torch.tensor([tokens])).logits[0]
    model, table = load(tmp_path, kernels=kernels), [4, 2, 6]
    logits = step(model, new_cache(model), [(tokens, 0, table)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    cache = new_cache(model)
    parts = [tokens[:17], tokens[17:37], *([token] for token in tokens[37:])]
    starts = (0, 17, 37, 38, 39)
    found = [
        step(model, cache, [(part, start, table)])
        for part, start in zip(parts, starts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("absorbs", [False, True])
def test_many_queries_with_keys_or_absorbed(
    absorbs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(40, vocab=101)
    expected = save(CONFIGS["v3"], tmp_path)(torch.tensor([tokens])).logits[0]
    monkeypatch.setattr(LatentBackend, "_absorbs", lambda *_: absorbs)
    model = load(tmp_path)
    cache = new_cache(model)
    first = step(model, cache, [(tokens[:20], 0, [4, 2, 6])])
    second = step(model, cache, [(tokens[20:], 20, [4, 2, 6])])
    torch.testing.assert_close(torch.cat((first, second)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "expected_heads"),
    [*((each, 4) for each in (torch.float32, torch.bfloat16, torch.float16)),
     (torch.float32, 2), (torch.float32, 64)],
)  # fmt: skip
def test_decodes_read_latents_in_place(dtype: torch.dtype, expected_heads: int) -> None:
    """Decodes beside a prompt, over contexts around the kernel's tiles and parts, equal torch's,
    also those of a layer with another number of heads than the model's config says."""
    lengths, heads, device = [1, 16, 17, 64, 65, 512, 513, 900], 4, torch.device("cpu")
    spec = LatentSpec(None, 32, 16, 8, 12, False, 0.2)
    generator = torch.Generator().manual_seed(0)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    blocks = iter(torch.randperm(200, generator=generator).tolist())
    tables = [[next(blocks) for _ in range(-(-length // BLOCK_SIZE))] for length in [*lengths, 5]]
    starts = [length - 1 for length in lengths]
    batch = AttentionBatch([*[1] * len(lengths), 5], [*starts, 0], tables, BLOCK_SIZE)
    count = len(lengths) + 5
    inputs = some(count, heads, 16), some(count, heads, 8), some(count, 1, spec.size)
    up = UpProjection(spec, some(heads, 16 + 12, 32))
    cache = some(1, 1, 200, 1, BLOCK_SIZE, spec.size)
    found = []
    for kernels in (choose_kernels("torch", device), choose_kernels("native", device)):
        shape = AttentionShape(expected_heads, 1, spec.size)
        backend = LatentBackend(shape, device, dtype, kernels)
        context = backend.prepare(batch)
        assert (context.in_place is None) == (kernels.name == "torch")
        copy = cache.clone()
        found.append((backend.attend_latents(0, *inputs, up, copy, context), copy))
    (expected, written), (out, written_too) = found
    assert torch.equal(written, written_too)
    near = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out, expected, rtol=near, atol=near)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_counts_weights_and_latents(name: str, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    model = load(tmp_path)
    footprint, stage = Footprint(model.spec, "float32"), Stage.whole(3)
    assert footprint.weights(stage) == model.weights_bytes
    assert footprint.kv_per_token(stage) == 3 * (32 + 8) * 4  # no heads, no separate values


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM have one more layer in their checkpoints."""
    save(CONFIGS["v3"], tmp_path)
    folder = tmp_path / "extra"
    folder.mkdir()
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for extra, fits in ((1, True), (0, False)):
        changed = {**config, "num_nextn_predict_layers": extra}
        (folder / "config.json").write_text(json.dumps(changed))
        if fits:
            load(folder)
        else:
            with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.3\.eh_proj"):
                load(folder)


def test_configs_that_are_refused() -> None:
    config = {**CONFIGS["v3"].to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    for changes, message in (
        ({"kv_lora_rank": None}, "kv_lora_rank must be an integer"),
        ({"n_group": 3}, "n_group 3 does not divide 8 experts"),
        ({"topk_group": 5}, "topk_group 5 of 4 groups"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelSpec.from_config({**config, **changes})
