"""Ranks of a model of transformers hold what `pdserve plan` says, and experts spread over them
compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from crowd import Crowd
from pdserve.cli.main import main
from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.all2all import AllToAllV, Replicated
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.hf.model import TransformersModel
from pdserve.common.model.hf.parallel import OutlineRanks
from pdserve.common.model.implementation import load_decoder, read_spec, read_weights_of
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage, pipeline_stages
from pdserve.common.planning.footprint import Footprint
from pdserve.common.worker.kv_cache import cache_bytes, cache_shapes
from sweep import tiny
from thinned import only
from tiny_engine import CPU, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

FAMILIES = [
    "gpt2", "opt", "gemma3_text", "gpt_oss", "phi3", "glm4_moe", "olmo3", "cohere2", "deepseek_v3",
    "qwen3_next", "llama4_text", "mistral", "bert",
]  # fmt: skip
FEW = ["gpt2", "gemma3_text", "glm4_moe"]


def made(name: str, folder: Path, weights: bool = False) -> Path:
    torch.manual_seed(0)
    config = tiny(CONFIG_MAPPING[name])
    if not weights:
        config.architectures = [name]
        config.save_pretrained(folder)
        return folder
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", only(FAMILIES, FEW))
def test_a_plan_counts_what_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersModel, "record", lambda self: None)
    folder, engine = made(name, tmp_path), EngineConfig(cache=CacheConfig(block_size=16))
    spec = read_spec(folder, "transformers", {})
    weights_of = read_weights_of(spec, folder, {})
    for tp, pp, ep in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2))[: 3 + (spec.num_experts > 0)]:
        group = OutlineRanks(tp)
        all2all: Any = Replicated(group if ep > 1 else GroupCoordinator())
        for stage in pipeline_stages(spec.num_layers, pp):
            sharding = Sharding(group, CPU, torch.bfloat16, all2all)
            config = ModelConfig(model=str(folder), load_format="dummy")
            model = load_decoder(spec, config, sharding, stage)
            found = Footprint(spec, "bfloat16", tp, ep, weights_of=weights_of)
            assert found.weights(stage) == model.weights_bytes
            shapes = cache_shapes(model, engine, group)
            assert found.kv_of_blocks(stage, 16) == tuple(map(cache_bytes, shapes))


def test_the_command_plans_a_class_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses what cannot be split, as a node does."""
    folder = made("gemma3_text", tmp_path)
    command = ["plan", "--model", f"{folder}/config.json", "--gpu-memory", "24GiB"]
    assert main([*command, "--tp", "2", "--enable-lora", "--json"]) == 0
    role = json.loads(capsys.readouterr().out)["roles"]["decode"]
    spec = read_spec(folder, "auto", {})
    assert role["weights"] == role["parameters"] * 4 == spec.num_parameters * 4
    assert 0.5 * role["weights"] < role["rank"]["weights"] < 0.52 * role["weights"]
    assert role["rank"]["adapters"] > 0
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    assert role["kv_per_token"] == kv and role["rank"]["kv_per_token"] == kv // 2
    for options, message in (
        (["--tp", "3"], "--tensor-parallel-size 3"),
        (["--tp", "2", "--ep", "2"], "has no experts"),
        (["--kv-cache-dtype", "int8"], "runs through transformers"),
        (["--model-impl", "native"], "is not supported"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


# ---- experts ----


@pytest.mark.parametrize("name", only(["glm4_moe", "gpt_oss", "mixtral"], ["glm4_moe"]))
def test_experts_spread_over_ranks_are_the_same(name: str, tmp_path: Path) -> None:
    folder, tokens = made(name, tmp_path, weights=True), some_tokens(40)
    spec, config = read_spec(folder, "transformers", {}), ModelConfig(model=str(folder))
    tokens = [token % spec.vocab_size for token in tokens]

    def work(member: Any, spread: bool) -> torch.Tensor:
        all2all: Any = Replicated(member if spread else GroupCoordinator())
        sharding = Sharding(member, CPU, torch.float32, all2all)
        model: Any = load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))
        assert model.expert_parallel_size == 1 + spread
        return step(model, new_cache(model), [(tokens, 0, [0, 1, 2])])

    (whole,) = Crowd(1).run(lambda member: work(member, spread=False))
    for part in Crowd(2).run(lambda member: work(member, spread=True)):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_experts_that_cannot_be_spread_are_refused(tmp_path: Path) -> None:
    folder = made("glm4_moe", tmp_path)
    spec = read_spec(folder, "auto", {})
    with pytest.raises(ConfigError, match="must be --tensor-parallel-size 4 and divide"):
        spec.validate_expert_parallel(4, 2)
    with pytest.raises(ConfigError, match="divide the model's 4 experts"):
        spec.validate_expert_parallel(8, 8)
    ranks: Any = OutlineRanks(2)
    sharding = Sharding(ranks, CPU, torch.float32, AllToAllV(ranks))
    config = ModelConfig(model=str(folder), load_format="dummy")
    with pytest.raises(ConfigError, match="supports replicated only"):
        load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))
