"""Mixtures of experts against transformers, and what their configs may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from paths import MODELS
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.all2all import RoutedTokens
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import ExpertLoad
from pdserve.common.model import expert_weights
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.moe import FusedExperts, MoE
from pdserve.common.model.sharding import Sharding
from pdserve.common.worker.runner import ModelRunner, dummy_batch, summarize_loads
from tiny_engine import (
    CPU,
    load,
    new_cache,
    some_tokens,
    step,
)

pytestmark = pytest.mark.usefixtures("inference")


# ---- against transformers ----


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 3,
}
QWEN = {**SMALL, "moe_intermediate_size": 48, "num_experts": 8}
SHARED = {"shared_expert_intermediate_size": 80}
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=6),
    "qwen2": Qwen2MoeConfig(**QWEN, **SHARED, norm_topk_prob=False),
    "qwen2-normed": Qwen2MoeConfig(**QWEN, **SHARED, norm_topk_prob=True, qkv_bias=False),
    "qwen2-mlp-only": Qwen2MoeConfig(**QWEN, **SHARED, mlp_only_layers=[1, 3]),
    "qwen3": Qwen3MoeConfig(**QWEN, head_dim=32, norm_topk_prob=False),
    "qwen3-normed": Qwen3MoeConfig(**QWEN, norm_topk_prob=True, tie_word_embeddings=True),
    "qwen3-every-other": Qwen3MoeConfig(**QWEN, decoder_sparse_step=2, norm_topk_prob=True),
}


def save(config: Any, folder: Path) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "gate" in name:  # what starts as 0 or 1 must show
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokens, config = some_tokens(40, vocab=101), CONFIGS[name]
    reference = save(config, tmp_path)
    expected = reference(torch.tensor([tokens])).logits[0]
    model = load(tmp_path)
    logits = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_which_layers_have_experts() -> None:
    spec = {name: ModelSpec.from_config(config_of(CONFIGS[name])) for name in CONFIGS}
    layers = {name: each.moe.sparse_layers for name, each in spec.items() if each.moe is not None}
    assert layers["mixtral"] == (0, 1, 2, 3)
    assert layers["qwen2-mlp-only"] == (0, 2)
    assert layers["qwen3-every-other"] == (1, 3)
    assert spec["qwen2-mlp-only"].has_dense_layers
    assert not spec["mixtral"].has_dense_layers


def config_of(config: Any) -> dict[str, Any]:
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}


# ---- the layer ----


def skewed(model: CausalLM) -> CausalLM:
    """Whatever the token, all scores are equal but those of experts 5 and 2."""
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            weight = layer.mlp.router.weight.dense()
            weight.zero_()
            bias = torch.full_like(layer.mlp_norm.weight, 1.0)
            weight[5] = bias
            weight[2] = -bias
    return model


def test_all_tokens_to_few_experts(tmp_path: Path) -> None:
    """No expert has a limit, and the others have nothing to do."""
    reference = save(CONFIGS["mixtral"], tmp_path)
    model, tokens = skewed(load(tmp_path)), some_tokens(40, vocab=101)
    with torch.inference_mode(False), torch.no_grad():
        for layer, ours in zip(reference.model.layers, model.layers, strict=True):
            assert isinstance(ours.mlp, MoE)
            layer.mlp.gate.weight.copy_(ours.mlp.router.weight.dense())
    logits = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    torch.testing.assert_close(
        logits, reference(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4
    )
    loads = model.expert_loads()
    assert loads is not None and loads.sum(1).tolist() == [120] * 4
    assert (loads[:, 5] + loads[:, 2]).min() >= 40  # each token visits one of them at least


def test_a_token_is_computed_alike_in_any_company() -> None:
    spec = ModelSpec.from_folder(MODELS / "mixtral")
    assert spec.moe is not None
    experts = FusedExperts("", spec.moe, 16, Sharding(GroupCoordinator(), CPU, torch.float32))
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.tensor.copy_(torch.randn(weight.tensor.shape))
    hidden, chosen = torch.randn(50, 16), torch.rand(50, 8).topk(2).indices
    weights = torch.rand(50, 2)
    together = experts(RoutedTokens(hidden, chosen, weights, 8))
    for rows in (slice(0, 1), slice(7, 30)):
        alone = experts(RoutedTokens(hidden[rows], chosen[rows], weights[rows], 8))
        torch.testing.assert_close(alone, together[rows])
    elsewhere = experts(RoutedTokens(hidden, torch.full_like(chosen, -1), weights, 8))
    assert not elsewhere.any()


def test_rows_that_a_kernel_leaves_out_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a rank with some of the experts: torch's grouped product leaves them undefined."""
    spec = ModelSpec.from_folder(MODELS / "mixtral")
    assert spec.moe is not None
    experts = FusedExperts("", spec.moe, 16, Sharding(GroupCoordinator(), CPU, torch.float32))
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.tensor.copy_(torch.randn(weight.tensor.shape))
    chosen = torch.rand(50, 8).topk(2).indices
    chosen[::3] = -1
    tokens = RoutedTokens(torch.randn(50, 16), chosen, torch.rand(50, 2), 8)
    expected = experts(tokens)
    grouped = torch.nn.functional.grouped_mm

    def undefined(*args: Any, offs: torch.Tensor) -> torch.Tensor:
        out = grouped(*args, offs=offs)
        out[int(offs[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", undefined)
    monkeypatch.setattr(expert_weights, "_has_kernel", lambda weight: True)
    torch.testing.assert_close(experts(tokens), expected)


# ---- statistics ----


def test_loads_are_folded_into_a_few_numbers() -> None:
    loads = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0]])
    assert summarize_loads(loads, ep=2)() == ExpertLoad((24, 8), balancedness=(1.0 + 0.25) / 2)


@pytest.mark.parametrize(("samples", "sampled"), [(True, True), (True, False), (False, True)])
def test_the_rank_that_answers_tells_what_experts_did(samples: bool, sampled: bool) -> None:
    model = load(MODELS / "qwen2-moe")  # one of 4 layers is dense
    batch = dummy_batch(6, 2, block_size=16, groups=model.spec.kv_groups)
    if not sampled:
        batch = replace(
            batch, sequences=tuple(replace(each, sampling=None) for each in batch.sequences)
        )
    load_ = ModelRunner(model, new_cache(model), CPU, samples).run(batch).experts
    if not samples:
        assert load_ is None
        return
    assert load_ is not None
    assert load_.assignments == (6 * 2 * 3,)
    assert 2 / 8 <= load_.balancedness <= 1


# ---- configs ----


def config(**changes: Any) -> dict[str, Any]:
    return {**config_of(CONFIGS["qwen2-mlp-only"]), **changes}


@pytest.mark.parametrize(
    ("tp", "ep", "changes", "message"),
    [
        (4, 3, {}, "--expert-parallel-size 3 does not divide --tensor-parallel-size 4"),
        (4, 4, {"num_experts": 6}, "--expert-parallel-size 4 does not divide the model's 6 exp"),
        (2, 1, {"moe_intermediate_size": 47}, "splits each expert over 2 ranks"),
        (2, 2, {"shared_expert_intermediate_size": 81}, "shared_expert_intermediate_size 81"),
    ],
)
def test_experts_that_cannot_be_spread(
    tp: int, ep: int, changes: dict[str, Any], message: str
) -> None:
    spec = ModelSpec.from_config(config(**changes))
    with pytest.raises(ConfigError, match=message):
        spec.validate_expert_parallel(tp, ep)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_local_experts or num_experts or n_routed_experts must"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        ({"moe_intermediate_size": "48"}, "moe_intermediate_size must be a whole number"),
    ],
)
def test_configs_that_make_no_mixture(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(config(**changes))


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": 4096}, 4096), ({"sliding_window": None}, None), ({}, None)],
)
def test_a_window_of_mixtral_is_in_use(changes: dict[str, Any], window: int | None) -> None:
    plain = {
        key: value
        for key, value in config_of(CONFIGS["mixtral"]).items()
        if key != "sliding_window"
    }
    assert set(ModelSpec.from_config({**plain, **changes}).layer_windows) == {window}
