"""Rotary embedding: every kind against transformers, the settings, and what overrides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.checkpoint_config import overridden
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.checkpoint import weights_revision
from pdserve.common.model.rotary import RotaryEmbedding
from tiny_engine import load, new_cache, some_tokens, step
from windowed import LATENTS, SIZES

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.3, 1.8, 2.5, 3.0, 4.0],
    "long_factor": [8.0] * 8,
    **ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **changes})


# ---- against transformers ----


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        {"rope_type": "yarn", "factor": 4.0},
        {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "factor": 0.5},
        {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 7},
        LONGROPE,
        {**LONGROPE, "factor": 16.0},
        {**LONGROPE, "attention_factor": 1.5},
        DYNAMIC,
    ],
    ids=lambda settings: "-".join(map(str, list(settings.values())[:2])),
)
def test_angles_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    settings = {"rope_theta": 5000.0, **settings}
    spec = spec_of(rope_parameters=settings)
    config = LlamaConfig(**{**CONFIG, "rope_parameters": settings})
    longest = spec.max_position_embeddings
    positions = torch.arange(longest)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = RotaryEmbedding(spec.rope, 16, CPU).angles(positions, torch.float32)
    for mine, theirs in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[0, :, :8], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("make", [DeepseekV2Config, DeepseekV3Config])
@pytest.mark.parametrize("scales", [{}, {"mscale": 0.7, "mscale_all_dim": 1.2}])
def test_latents_with_yarn(make: Any, scales: dict[str, float], tmp_path: Path) -> None:
    """Their models put a part of YaRN's factor on the scores."""
    rope = {"rope_theta": 5000.0, **YARN, **scales, "original_max_position_embeddings": 8}
    base = LATENTS["deepseek"].to_dict()
    kept = {key: base[key] for key in base if key.endswith(("_rank", "_dim", "_experts"))}
    groups = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    sizes = {**SIZES, **kept, **groups, "num_key_value_heads": 4, "moe_intermediate_size": 24}
    more = {"topk_method": "greedy"} if make is DeepseekV2Config else {}
    torch.manual_seed(0)
    tokens = some_tokens(60, vocab=101)
    with torch.inference_mode(False), torch.no_grad():
        config = make(**{**sizes, **more, "vocab_size": 101, "rope_parameters": rope})
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        reference.save_pretrained(tmp_path)
        expected = reference(torch.tensor([tokens])).logits[0]
    model = load(tmp_path)
    logits = step(model, new_cache(model), [(tokens, 0, [4, 2, 6, 1])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# ---- config.json ----


def test_settings_are_read_in_both_forms() -> None:
    old = spec_of(rope_theta=5e5, rope_scaling=LLAMA3)
    new = spec_of(rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert old.rope == new.rope
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("llama3", 5e5, 8.0)
    assert new.rope.original_max_position_embeddings == 64
    outside = spec_of(rope_scaling={**YARN, **ORIGINAL}, original_max_position_embeddings=32)
    assert outside.rope.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "su", "factor": 4.0}, "'su'.*default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "'linear' needs a factor"),
        ({"type": "yarn"}, "'yarn' needs a factor"),
        ({"rope_type": "yarn", "factor": "4"}, "factor must be a positive number, not '4'"),
        ({"rope_type": "yarn", "factor": -1}, "factor must be a positive number, not -1"),
        ({**LONGROPE, "short_factor": [1.0] * 7}, "short_factor must be a list of 8 numbers"),
        ({**LONGROPE, "short_factor": [1.0] * 7 + ["x"]}, "positive number, not 'x'"),
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, "mrope.*images.*checkpoint of a text"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope.*images"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**YARN, "rope_theta": 1.0}, "theta and context must be more than 1"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "theta and context must be more"),
        ([4.0], "rope_parameters must be an object"),
    ],
)
def test_unsupported_settings_are_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(rope_parameters=settings)


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({**YARN, "factor": 8.0}, 512),  # the config keeps a shorter length
        ({**YARN, "factor": 2.0}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        (LONGROPE, 64),
        (DYNAMIC, 256),
    ],
)
def test_the_context_is_what_is_computed_exactly(settings: Any, context: int) -> None:
    spec = spec_of(rope_parameters=settings)
    assert spec.max_position_embeddings == context
    spec.check_max_model_len(context)
    once = "original context" if settings["rope_type"] in ("longrope", "dynamic") else "positions"
    with pytest.raises(ConfigError, match=f"--max-model-len {context + 1} exceeds.*{once}"):
        spec.check_max_model_len(context + 1)


# ---- overrides ----


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 3}}, {"a": 1, "b": {"c": 3, "d": 2}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7}},
            {"rope_scaling": {"attention_factor": None}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        ),
        (
            {"rope_theta": 1e4},
            {"rope_theta": 5e5},
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        ),
    ],
)
def test_overrides_merge(config: Any, overrides: Any, expected: Any) -> None:
    before = json.dumps([config, overrides])
    assert overridden(config, overrides) == expected
    assert json.dumps([config, overrides]) == before


def test_the_short_forms_win_over_hf_overrides() -> None:
    given = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 512}
    config = ModelConfig(hf_overrides=given, rope_scaling={"factor": 4.0}, rope_theta=7e3)
    spec = ModelSpec.from_config(overridden({**CONFIG, "rope_theta": 1e4}, config.overrides))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 4.0, 7e3)
    assert spec.max_position_embeddings == 512


def test_overrides_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id.*stop_token_ids"):
        ModelConfig(hf_overrides={"eos_token_id": 3})
    with pytest.raises(ConfigError, match=r"default.*not by null"):
        overridden(CONFIG, {"rope_scaling": None})


def test_nodes_with_other_overrides_have_other_revisions(tmp_path: Path) -> None:
    folder = MODELS / "llama-gqa"
    changed = weights_revision(folder, overrides={"rope_theta": 5.0})
    assert changed != weights_revision(folder, overrides={"rope_theta": 6.0})
    assert changed != weights_revision(folder) == weights_revision(folder, overrides={})
