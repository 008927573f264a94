"""Reading config.json and safetensors: what is accepted, and what the refusals say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core import host
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import LayerKV, grouped, kv_groups
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model import device as dtypes
from pdserve.common.model.checkpoint import weights_revision
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.device import choose_dtype
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding

LLAMA = MODELS / "llama-gqa"
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


def load(folder: Path, **options: Any) -> CausalLM:
    spec = ModelSpec.from_folder(folder)
    config = ModelConfig(model=str(folder), **options)
    return load_model(spec, config, Sharding(GroupCoordinator(), CPU, torch.float32))


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **changes})


# ---- config.json ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM.*Qwen3"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"quantization_config": {"quant_method": "quark"}}, "quark.*AWQ.*GPTQ.*int8"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*float32, bfloat16, float16"),
        ({"vocab_size": None}, "vocab_size must be an integer"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(**changes)


def test_families_differ_as_their_checkpoints_do() -> None:
    def traits(name: str, **changes: Any) -> tuple[bool, ...]:
        spec = spec_of(architectures=[f"{name}ForCausalLM"], **changes)
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    assert traits("Llama") == (False, False, False, False)
    assert traits("Llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert traits("Mistral", attention_bias=True) == (False, False, False, False)
    assert traits("Qwen2") == (True, False, False, False)
    assert traits("Qwen3") == (False, False, False, True)


USED = {"sliding_window": 32, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("Mistral", {"sliding_window": 32}, [32] * 4),
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Mistral", {}, [4096] * 4),
        ("Qwen2", {"sliding_window": 32}, [None] * 4),
        ("Qwen2", {**USED, "use_sliding_window": False}, [None] * 4),
        ("Qwen3", USED, [None] * 4),  # max_window_layers is 28
        ("Qwen3", {**USED, "max_window_layers": 1}, [None, 32, 32, 32]),
        (
            "Qwen2",
            {**USED, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [32, None, 32, None],
        ),
        ("Llama", {"sliding_window": 32}, [None] * 4),
    ],
)
def test_which_layers_have_a_window(
    name: str, settings: dict[str, Any], windows: list[int | None]
) -> None:
    spec = spec_of(architectures=[f"{name}ForCausalLM"], num_hidden_layers=4, **settings)
    assert list(spec.layer_windows) == windows


def test_layer_types_that_do_not_fit_are_refused() -> None:
    for kinds in (["full_attention"], ["chunked_attention"] * 4):
        with pytest.raises(ConfigError, match="layer_types"):
            spec_of(
                architectures=["Qwen2ForCausalLM"], num_hidden_layers=4, **USED, layer_types=kinds
            )


def test_groups_of_layers_with_one_window() -> None:
    full, far, near = kv_groups((8, None, 32, 8, None), num_kv_heads=2, head_dim=16)
    assert [each.layers for each in (full, far, near)] == [(1, 4), (2,), (0, 3)]
    assert full.layers_between(1, 4) == (0, 1) and near.layers_between(1, 2) == (1, 1)
    assert full.first_block(100, 4) == 0
    assert [near.first_block(position, 4) for position in (0, 7, 10, 11, 15)] == [0, 0, 0, 1, 2]


def test_groups_of_layers_with_other_heads_chunks_and_shared_keys() -> None:
    wide, narrow, chunk = LayerKV(1, 32), LayerKV(2, 16), LayerKV(2, 16, 8, chunked=True)
    groups = grouped([narrow, chunk, wide, narrow, 1, 3])
    assert [(each.layers, each.num_kv_heads, each.head_dim) for each in groups] == [
        ((0, 3), 2, 16), ((2,), 1, 32), ((1,), 2, 16)
    ]  # fmt: skip
    chunks = groups[2]
    assert chunks.name == "chunks of 8 tokens"
    assert [chunks.first_block(position, 4) for position in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert groups[1].head_range(1, 2) == (0, 1) and groups[0].head_range(1, 2) == (1, 2)


def test_a_context_beyond_the_model_is_refused() -> None:
    spec = spec_of(architectures=["MistralForCausalLM"], sliding_window=32)
    spec.check_max_model_len(256)
    with pytest.raises(ConfigError, match="257 exceeds the model's 256 positions"):
        spec.check_max_model_len(257)


@pytest.mark.parametrize(
    ("size", "message"),
    [(3, "4 heads"), (8, "4 heads"), (64, "4 heads")],
)
def test_a_split_of_the_heads_must_be_even(size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .*{message}"):
        spec_of().validate_tensor_parallel(size)


def test_a_split_of_kv_heads_or_mlp_must_be_even() -> None:
    with pytest.raises(ConfigError, match="3 KV heads"):
        spec_of(num_attention_heads=6, num_key_value_heads=3).validate_tensor_parallel(2)
    with pytest.raises(ConfigError, match="intermediate_size 97"):
        spec_of(intermediate_size=97).validate_tensor_parallel(2)
    spec_of(vocab_size=101).validate_tensor_parallel(4)


def test_kv_heads_of_ranks() -> None:
    def ranges(size: int) -> list[tuple[int, int]]:
        return [spec_of().kv_head_range(rank, size) for rank in range(size)]

    assert ranges(1) == [(0, 2)]
    assert ranges(2) == [(0, 1), (1, 2)]
    assert ranges(4) == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_end_tokens_come_from_the_generation_config_first() -> None:
    config = {**CONFIG, "eos_token_id": 2}
    assert ModelSpec.from_config(config).eos_token_ids == (2,)
    assert ModelSpec.from_config(config, {"eos_token_id": [2, 0]}).eos_token_ids == (2, 0)
    assert ModelSpec.from_config(CONFIG).eos_token_ids == ()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelSpec.from_folder(tmp_path)


# ---- weights ----

Edit = Callable[[dict[str, torch.Tensor]], object]


def edited(tmp_path: Path, edit: Edit) -> Path:
    """A copy of the tiny Llama whose weights `edit` has changed in place."""
    folder = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_all_wrong_tensors_are_named_at_once(tmp_path: Path) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
        weights["model.layers.0.self_attn.q_proj.lora"] = torch.zeros(1)
        weights["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(3, 5)

    with pytest.raises(ConfigError) as caught:
        load(edited(tmp_path, edit))
    message = caught.value.message
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.lora" in message
    assert "model.layers.2.self_attn.k_proj.weight [3, 5] ≠ [64, 128]" in message


def test_needless_tensors_are_ignored(tmp_path: Path) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = torch.zeros(512, 128)  # the embeddings are tied
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    model = load(edited(tmp_path, edit))
    assert model.head.lm_head.weight is model.embedding.weight
    assert model.head.lm_head.weight.dense().any()


def test_files_that_are_absent_or_broken_are_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "mistral", tmp_path / "sharded"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks model-00002-of-00003"):
        load(folder)
    folder = Path(shutil.copytree(LLAMA, tmp_path / "single"))
    (folder / "model.safetensors").write_bytes(b"\x80" * 64)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load(folder)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        weights_revision(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="only safetensors"):
        load(folder)


def test_dummy_weights_follow_the_seed_and_need_no_files(tmp_path: Path) -> None:
    shutil.copy(LLAMA / "config.json", tmp_path)

    def weight(seed: int) -> torch.Tensor:
        return load(tmp_path, load_format="dummy", seed=seed).layers[0].mlp.down_proj.weight.dense()

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    assert 0 < weight(1).abs().max() < 0.1


# ---- dtype and revision ----


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "fast_cpu", "expected"),
    [
        ("auto", "bfloat16", "cpu", False, torch.float32),
        ("auto", "bfloat16", "cpu", True, torch.bfloat16),
        ("auto", "float16", "cpu", True, torch.float32),
        ("auto", "float16", "cuda", False, torch.float16),
        ("bfloat16", "float32", "cpu", False, torch.bfloat16),
    ],
)
def test_dtype(
    requested: str,
    checkpoint: str,
    device: str,
    fast_cpu: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "cpu_has_fast_bf16", lambda: fast_cpu)
    assert choose_dtype(requested, checkpoint, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("cpu_info", "fast"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("flags : fpu avx2\n", False),
        ("Features : asimd bf16\n", True),
    ],
)
def test_fast_bf16_is_read_from_the_cpu(
    cpu_info: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "cpuinfo")
    assert not dtypes.cpu_has_fast_bf16()
    (tmp_path / "cpuinfo").write_text(cpu_info)
    assert dtypes.cpu_has_fast_bf16() == fast


def test_a_revision_tells_fine_tunes_apart(tmp_path: Path) -> None:
    same = edited(tmp_path / "same", lambda weights: None)
    other = edited(tmp_path / "other", lambda weights: [w.mul_(1.01) for w in weights.values()])
    assert weights_revision(same) == weights_revision(same)
    merged = edited(tmp_path / "merged", lambda weights: list(weights.values())[-3].mul_(1.01))
    assert len({weights_revision(folder) for folder in (same, other, merged)}) == 3
    config = json.loads((same / "config.json").read_text())
    before = weights_revision(same)
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert weights_revision(same) != before


def test_a_dummy_revision_is_its_seed() -> None:
    revisions = {weights_revision(LLAMA, "dummy", seed) for seed in (0, 0, 1)}
    assert len(revisions) == 2
    assert weights_revision(LLAMA) not in revisions
