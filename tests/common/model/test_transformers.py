"""Decoders that transformers' classes compute over the paged cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    Phi3Config,
    RobertaConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.cli.main import main
from pdserve.cli.models import known_models
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.generic_spec import _TEXT_DEFAULTS, read_outline
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.hf.class_config import read_config
from pdserve.common.model.hf.layout import choose_layout
from pdserve.common.model.hf.model import TransformersModel
from pdserve.common.model.hf.parallel import OutlineRanks
from pdserve.common.model.hf.pipeline import Watch, check_stage
from pdserve.common.model.implementation import load_decoder, read_spec
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from sweep import CASES, logits, one, tiny
from windowed import SIZES, THROUGH_TRANSFORMERS

EVERY_TIME = (  # beside those of tests/kv_transfer/test_classes.py
    "bart",  # positions of a decoder that counts its tokens
    "bloom",  # ALiBi
    "falcon",  # attention of its own
    "gemma2",  # soft caps
    "gemma4_text",  # heads of two sizes, layers that share KV
    "gpt2",
    "lfm2",  # short convolutions
    "mamba",  # no attention
    "mistral3",  # natively, without its tower
    "nemotron_h",  # Mamba-2, and layers that keep nothing
    "roberta",  # positions from the padding token on
)
SPLIT = ("gpt2",)  # without a plan


@pytest.mark.parametrize("name", EVERY_TIME)
def test_log_probabilities_and_tokens_are_those_of_transformers(name: str) -> None:
    row = {**known_models()[name], "result": "exact"}
    if name not in SPLIT:
        row.pop("with", None)
    assert one(name, split=name in SPLIT) == row


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in known_models() if name not in SPLIT])
def test_the_list_of_models_is_what_the_sweep_finds(name: str) -> None:
    known = known_models()[name]
    if known["result"] == "not compared":
        pytest.skip(known["why"])
    found = one(name)
    assert [found.get(key) for key in ("result", "with")] == [
        known.get(key) for key in ("result", "with")
    ]


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gemma2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gemma2"] == known_models()["gemma2"]
    assert main(["models", "llama"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["models", "nothing-like-it"]) == 2


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(THROUGH_TRANSFORMERS["gemma3"]).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, group: Any = None, **options: Any) -> Decoder:
    config = ModelConfig(model=str(folder), **options)
    spec = read_spec(folder, config.model_impl, {})
    sharding = Sharding(group or GroupCoordinator(), torch.device("cpu"), torch.float32)
    return load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))


def test_a_model_with_towers_is_served_as_its_text_model(tmp_path: Path) -> None:
    """Gemma 3's config leaves sizes of its text model to transformers' defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**text, "sliding_window": 24},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    spec = read_spec(tmp_path, "auto", {})
    assert (spec.architecture, spec.num_layers) == ("Gemma3ForConditionalGeneration", 6)
    assert [group.window for group in spec.kv_groups] == [None, 24]
    path.write_text(json.dumps({**config, "model_type": "paligemma"}))
    with pytest.raises(ConfigError, match="images or audio"):
        read_spec(tmp_path, "auto", {})


@pytest.mark.parametrize("nested", [False, True])
def test_a_rotation_for_images_is_that_of_text_without_them(nested: bool, tmp_path: Path) -> None:
    """Qwen's own configs have the text model's keys beside `vision_config`."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = {**SIZES, "rope_scaling": rope, "rope_theta": 1e6, "tie_word_embeddings": True}
    outer = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"hidden_size": 32},
    }
    inner = {**text, "model_type": "qwen2_5_vl_text", "architectures": outer["architectures"]}
    config = {**outer, "text_config": inner} if nested else {**text, **outer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path, "auto", {})
    assert (spec.impl, spec.architecture, spec.qkv_bias) == ("native", "Qwen2ForCausalLM", True)
    assert (spec.rope.kind, spec.rope.theta, spec.tie_word_embeddings) == ("default", 1e6, True)
    place = config["text_config"] if nested else config
    for changes, message in (({"hidden_size": None}, "hidden_size"), ({"model_type": ["a"]}, None)):
        spoilt = {**place, **changes}
        text = json.dumps({**config, "text_config": spoilt} if nested else spoilt)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_spec(tmp_path, "auto", {})


def test_defaults_of_text_models_are_those_of_transformers() -> None:
    for name, (vocabulary, positions) in _TEXT_DEFAULTS.items():
        config = CONFIG_MAPPING[name]()
        assert (config.vocab_size, config.max_position_embeddings) == (vocabulary, positions)


def test_weights_that_do_not_fit_are_refused(gemma: Path) -> None:
    file = gemma / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    for changed, message in (
        ({key: value for key, value in weights.items() if key != name}, f"missing: {name}"),
        ({**weights, name: torch.zeros(3, 3)}, "up_proj"),
    ):
        save_file(changed, file, {"format": "pt"})
        for group in (None, OutlineRanks(2)):
            with pytest.raises(ConfigError, match=message):
                load(gemma, group)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        load(gemma)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_ranks_load_their_part_alone(name: str, tmp_path: Path) -> None:
    """Embedding and linear layers are divided, also in a class without a plan."""
    AutoModelForCausalLM.from_config(THROUGH_TRANSFORMERS[name]).save_pretrained(tmp_path)
    whole = load(tmp_path).weights_bytes
    parts = [load(tmp_path, OutlineRanks(2, rank)).weights_bytes for rank in range(2)]
    positions = 1024 * 64 * 4 if name == "gpt2" else 0  # on each rank
    assert all(part < 0.51 * (whole - positions) + positions for part in parts)


def test_more_ranks_than_kv_heads(gemma: Path) -> None:
    spec, tokens = read_spec(gemma, "auto", {}), torch.arange(3, 76)
    whole = logits(gemma, spec, tokens)
    torch.testing.assert_close(logits(gemma, spec, tokens, tp=4), whole, rtol=1e-4, atol=1e-4)


def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves models as they are loaded."""
    monkeypatch.setattr(TransformersModel, "record", lambda self: None)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model._steps.model.named_parameters())


def test_ranks_and_stages_with_dummy_weights_are_one_model(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrecorded(monkeypatch)
    parts = [load(gemma, OutlineRanks(2, rank), load_format="dummy") for rank in range(2)]
    whole = load(gemma, load_format="dummy")
    found = [weights_of(part)["model.embed_tokens.weight"] for part in parts]
    assert torch.equal(torch.cat(found), weights_of(whole)["model.embed_tokens.weight"])


def test_stages_that_need_more_than_hidden_states_are_refused() -> None:
    kept = LayerKV(2, 16)
    check_stage("Any", [kept, kept, 1, 0], Stage(0, 4))
    with pytest.raises(ConfigError, match="layer 3 attends to the KV of layer 0"):
        check_stage("Any", [kept, kept, 1, 0], Stage(1, 4, first=False))


class Adds(nn.Module):
    def forward(self, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return hidden + other.sum()


class Skips(nn.Module):
    """Its layers are given the embeddings too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Adds() for _ in range(2))

    def forward(self, tokens: torch.Tensor, also: bool) -> None:
        hidden = first = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, first if also else tokens)


@pytest.mark.parametrize("also", [False, True])
def test_inputs_of_layers_are_watched(also: bool) -> None:
    model = Skips()
    watch = Watch(model, model.layers, hidden_size=4)
    model(torch.zeros(1, 3, dtype=torch.long), also)
    assert watch.reason == ("its layers need more than the output of the one before" * also)


def test_dummy_weights_need_only_a_config(gemma: Path) -> None:
    (gemma / "model.safetensors").unlink()
    load(gemma, load_format="dummy")
    with pytest.raises(ConfigError, match=r"lacks \*\.safetensors"):
        load(gemma)


def test_mxfp4_weights_are_dequantized_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrecorded(monkeypatch)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THROUGH_TRANSFORMERS["gpt-oss"])
    model.save_pretrained(tmp_path)
    weights, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    expected = {}
    for name in [name for name in weights if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, blocks.shape[:3], dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, file, {"format": "pt"})
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    found = weights_of(load(tmp_path))
    assert len(expected) == 8
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_rope_that_depends_on_the_longest_sequence_ends_at_the_original_context(
    tmp_path: Path,
) -> None:
    """Beyond it transformers would turn all sequences of a step by the longest one."""
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "pad_token_id": 0}
    Phi3Config(
        **sizes,
        architectures=["Phi3ForCausalLM"],
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 128},
    ).save_pretrained(tmp_path)
    spec = read_spec(tmp_path, "auto", {})
    assert spec.impl == "transformers" and spec.max_position_embeddings == 128
    assert read_outline(tmp_path, "auto", {}).max_position_embeddings == 128


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    BambaConfig(attn_layer_indices=[1], num_hidden_layers=2).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert [group.state for group in read_spec(tmp_path, "auto", {}).kv_groups] == [False, True]


def test_positions_that_padding_takes_are_not_the_context_s(tmp_path: Path) -> None:
    RobertaConfig(max_position_embeddings=514, is_decoder=True).save_pretrained(tmp_path)
    assert read_outline(tmp_path, "auto", {}).max_position_embeddings == 512


def test_a_context_that_the_config_does_not_state(tmp_path: Path) -> None:
    BloomConfig().save_pretrained(tmp_path)
    assert read_outline(tmp_path, "auto", {}).max_position_embeddings == 2048
    assert CONFIG_MAPPING["falcon"]().max_position_embeddings == 2048


def test_a_layer_that_counts_twice_is_not_cut(tmp_path: Path) -> None:
    tiny(CONFIG_MAPPING["falcon_h1"]).save_pretrained(tmp_path)
    spec, config = read_spec(tmp_path, "auto", {}), read_config(tmp_path, {})
    assert spec.num_layers == 8
    with pytest.raises(ConfigError, match="multiples of 2: use --pipeline-partition"):
        choose_layout(spec, config, 1, Stage(0, 3, last=False))


FALCONS = {
    "multi-query": {"multi_query": True, "new_decoder_architecture": False},
    "as many keys": {"multi_query": False, "new_decoder_architecture": False},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("heads", FALCONS.values(), ids=FALCONS)
def test_heads_of_falcon(heads: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "falcon", heads)
    assert one("falcon", split=False)["result"] == "exact"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nothing"}, "no model type 'nothing'"),
        ({"vocab_size": None}, "vocab_size"),
        (
            {"model_type": "bamba", "time_step_limit": [0.0, "inf"]},
            "cannot read .*'time_step_limit'",
        ),
        ({"vision_config": {"hidden_size": 8}}, "images or audio"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be from 1 to"),
        ({"vocab_size": 10**15}, "vocab_size must be from 1 to"),
        ({"layer_types": ["conv"] + ["full_attention"] * 3}, "layer 0 is a short convolution"),
    ],
)
def test_configs_that_are_refused(gemma: Path, changes: dict[str, Any], message: str) -> None:
    path = gemma / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message):
        read_spec(gemma, "auto", {})
