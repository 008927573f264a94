"""Steps of transformers' classes as graphs with pdserve's kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention_native import NativeAttention
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.hf import model as hf_model
from pdserve.common.model.hf.attention_fusion import FusedAttention
from pdserve.common.model.hf.model import TransformersModel
from pdserve.common.model.hf.probe import difference, probe
from pdserve.common.model.hf.steps import ClassSteps, GraphSteps
from pdserve.common.model.implementation import load_decoder, read_spec
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from windowed import THROUGH_TRANSFORMERS

CPU = torch.device("cpu")


def load(folder: Path, impl: str = "transformers", kernels: str = "native") -> Any:
    spec = read_spec(folder, impl, {})
    found = choose_kernels(kernels, CPU)
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32, kernels=found)
    config = ModelConfig(model=str(folder), model_impl=impl)
    return load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))


def called(model: Any) -> list[str]:
    """Returns the kinds of what the graph of a step calls."""
    return [type(each.target).__name__ for each in model._steps.body.calls]


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(THROUGH_TRANSFORMERS["gemma3"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_a_class_like_ours_becomes_our_kernels(name: str) -> None:
    """A layer is then two products of what was five linear layers, two norms with their sums, one
    attention with norms and rotation, and as many calls as natively."""
    model, native = load(MODELS / name), load(MODELS / name, "native")
    layers = model.spec.num_layers
    kinds = called(model)
    assert kinds.count(FusedAttention.__name__) == layers
    assert kinds.count("AdaptedProduct") == 4 * layers
    assert isinstance(model.attentions[0], NativeAttention)
    with torch.inference_mode():
        found, expected = (probe(each, GroupCoordinator()) for each in (model, native))
    del found[::3], expected[::3]  # hidden states: the class's are normed
    assert len(found) == 4 and not difference(found, expected)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_weights_are_used_once(gemma: Path, kernels: str) -> None:
    """The class's own copies are gone."""
    model = load(gemma, kernels=kernels)
    assert isinstance(model._steps, GraphSteps)
    held = model._steps.body.constants
    assert all(each.ndim < 2 for each in held if isinstance(each, torch.Tensor))


def test_code_that_cannot_be_recorded_runs_as_it_is(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, own = load(gemma), Gemma3MLP.forward

    def looks(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all()
        return own(self, x)

    monkeypatch.setattr(Gemma3MLP, "forward", looks)
    spec = expected.spec  # which is described without values, too
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32)
    config = ModelConfig(model=str(gemma), model_impl="transformers")
    with caplog.at_level(logging.INFO):
        model: Any = load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))
    assert isinstance(model._steps, ClassSteps)
    assert "runs by its class's own code" in caplog.text
    with torch.inference_mode():
        assert not difference(*(probe(each, GroupCoordinator()) for each in (model, expected)))


def test_a_graph_that_computes_something_else_is_not_used(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = []

    def differs(found: Any, expected: Any) -> str:
        said.append(difference(found, expected))
        return "a step differs by 0.5"

    monkeypatch.setattr(hf_model, "difference", differs)
    model: TransformersModel = load(gemma)
    assert said == [""]
    assert isinstance(model._steps, ClassSteps)
    assert "runs by its class's own code: a step differs by 0.5" in caplog.text


def test_differences_beyond_rounding_are_found() -> None:
    numbers = [torch.arange(4.0)]
    assert not difference([numbers[0] * (1 + 1e-5)], numbers)
    assert "differs by 0.33" in difference([numbers[0] + 1.0], numbers)
    assert difference([numbers[0] * float("nan")], numbers)
