"""`--quantization int8` where transformers' classes compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, FalconConfig

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.hf import model as hf_model
from pdserve.common.model.implementation import load_decoder, read_spec, read_weights_of
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint
from sweep import logits, rounded_model, tiny
from thinned import slow
from tiny_engine import CPU
from windowed import STATES, THROUGH_TRANSFORMERS

TOKENS = torch.arange(3, 79)
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def load(folder: Path, impl: str = "transformers", kernels: str = "torch") -> Any:
    spec = read_spec(folder, impl, {})
    sharding = Sharding(
        GroupCoordinator(), CPU, torch.float32, kernels=choose_kernels(kernels, CPU)
    )
    config = ModelConfig(model=str(folder), model_impl=impl, quantization="int8")
    return load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))


def made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(THROUGH_TRANSFORMERS[name]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["gemma3", slow("gpt-oss"), slow("gpt2"), slow("bart")])
def test_numbers_are_those_of_rounded_weights_however_the_class_is_split(
    name: str, tmp_path: Path
) -> None:
    """Gemma's head is its embedding, and so is GPT-2's, whose matrices lie the other way round, as
    those of gpt-oss' experts, which have biases."""
    check_rounded(made(name, tmp_path), {}, {"tp": 2}, {"pp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe", slow("nemotron_h"), slow("qwen3_next")])
def test_ranks_round_their_experts(name: str, tmp_path: Path) -> None:
    """They split each, or have some of them; some classes have states beside."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny(CONFIG_MAPPING[name])).save_pretrained(tmp_path)
    check_rounded(tmp_path, {"tp": 2}, {"tp": 2, "spread": True})


def check_rounded(folder: Path, *splits: dict[str, Any]) -> None:
    spec = read_spec(folder, "transformers", {})
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        right = rounded_model(model, spec)(TOKENS[None]).logits[0]
    for split in splits:
        found = logits(folder, spec, TOKENS, quantization="int8", **split)
        torch.testing.assert_close(found, right[: len(found)], **CLOSE)
    plain = logits(folder, spec, TOKENS)
    assert (plain - found).abs().max() > 5 * CLOSE["atol"]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("qwen3", "native"), ("mixtral", "native"), slow("qwen3", "torch"), slow("mixtral", "torch")],
)
def test_both_paths_hold_and_compute_the_same(name: str, kernels: str) -> None:
    folder = MODELS / name
    ours, native = load(folder, kernels=kernels), load(folder, "native", kernels)
    assert ours.weights_bytes == native.weights_bytes
    spec = ours.spec
    plan = Footprint(spec, "float32", weights_of=read_weights_of(spec, folder, {}))
    assert plan.weights(Stage.whole(spec.num_layers)) == ours.weights_bytes
    found, right = (
        logits(folder, read_spec(folder, impl, {}), TOKENS, quantization="int8")
        for impl in ("transformers", "native")
    )
    torch.testing.assert_close(found, right, **CLOSE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (STATES["lfm2"], "Lfm2ForCausalLM has recurrent layers"),
        (tiny(FalconConfig), "found no linear layers of FalconForCausalLM"),
    ],
    ids=["states", "layers"],
)
def test_models_that_cannot_be_rounded_are_refused_by_their_config(
    config: Any, message: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    spec_of = json.loads((tmp_path / "config.json").read_text())
    spec_of["architectures"] = [next(word for word in message.split() if word[0].isupper())]
    (tmp_path / "config.json").write_text(json.dumps(spec_of))
    with pytest.raises(ConfigError, match=f"--quantization int8: {message}"):
        read_spec(tmp_path, "auto", {}).quantized("int8")


def test_a_class_that_runs_by_its_own_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_model, "difference", lambda *_: "a step differs by 0.5")
    with pytest.raises(ConfigError, match=r"own code \(a step differs by 0\.5\)"):
        load(made("gemma3", tmp_path))
