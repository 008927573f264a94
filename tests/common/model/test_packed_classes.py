"""Checkpoints whose weights stay packed where transformers' classes compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV32Config

from benchmarks.quantized_folder import Scheme, quantize_matrix
from gguf_files import write_gguf
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
from pdserve.demo_model.embedded import resolve_model
from slow_quantization import dequantize
from stored_folders import compressed, folders, pack_quantized
from sweep import logits, tiny
from thinned import slow
from tiny_engine import CPU
from windowed import INDEXED

pytestmark = pytest.mark.usefixtures("inference")

TOKENS = torch.arange(3, 79)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
W4A16 = compressed(
    "pack-quantized", num_bits=4, symmetric=True, type="int", strategy="group", group_size=32
)
AWQ, GPTQ = Scheme("awq"), Scheme("gptq", desc_act=True)
SPLITS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "spread": True}]


def packed(
    source: Path, target: Path, scheme: Scheme | dict[str, Any], more: tuple[str, ...] = ()
) -> Path:
    """Makes `target`, and `target`-dense beside it."""
    if isinstance(scheme, dict):

        def pack(matrix: Tensor, _: int) -> tuple[dict[str, Tensor], Tensor]:
            return pack_quantized(matrix, 4, True)

        return folders(source, target, scheme, pack, more)

    def quantize(matrix: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tensors = quantize_matrix(matrix, scheme, seed)
        named = {f"a.{part}": tensor for part, tensor in tensors.items()}
        return tensors, dequantize(named, "a", scheme)

    return folders(source, target, scheme.config, quantize)


def made(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, impl: str) -> Any:
    spec = read_spec(folder, impl, {})
    sharding = Sharding(
        GroupCoordinator(), CPU, torch.float32, kernels=choose_kernels("native", CPU)
    )
    config = ModelConfig(model=str(folder), model_impl=impl)
    return load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))


def check_bytes(folder: Path) -> Any:
    """Ranks hold what `plan` says. Returns the model."""
    ours = load(folder, "transformers")
    plan = Footprint(ours.spec, "float32", weights_of=read_weights_of(ours.spec, folder, {}))
    assert plan.weights(Stage.whole(ours.spec.num_layers)) == ours.weights_bytes
    return ours


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("llama-gqa", W4A16), slow("qwen2", Scheme("awq", group_size=64)), slow("qwen3", GPTQ)],
    ids=["w4a16", "awq", "gptq"],
)
def test_both_paths_hold_and_compute_the_same(name: str, scheme: Any, tmp_path: Path) -> None:
    """To the bit, also on ranks and stages. These may sum groups in another order than one rank."""
    folder = packed(MODELS / name, tmp_path / "a", scheme)
    ours, native = (read_spec(folder, impl, {}) for impl in ("transformers", "native"))
    right = logits(folder, native, TOKENS, kernels="native")
    assert torch.equal(logits(folder, ours, TOKENS, kernels="native"), right)
    for split in ({"tp": 2}, {"pp": 2}):
        found, same = (
            logits(folder, spec, TOKENS, kernels="native", **split) for spec in (ours, native)
        )
        assert torch.equal(found, same)
        torch.testing.assert_close(found, right, **CLOSE)
    assert check_bytes(folder).weights_bytes == load(folder, "native").weights_bytes


@pytest.mark.parametrize(
    ("name", "scheme", "splits"),
    [
        ("mixtral", W4A16, SPLITS[2:]),
        slow("qwen2-moe", AWQ, SPLITS),
        slow("mixtral", GPTQ, SPLITS),
    ],
    ids=["w4a16", "awq", "gptq"],
)
def test_experts_stay_packed(
    name: str, scheme: Any, splits: list[dict[str, Any]], tmp_path: Path
) -> None:
    """On both paths, however they are split."""
    folder = packed(MODELS / name, tmp_path / "a", scheme)
    ours, native = (read_spec(folder, impl, {}) for impl in ("transformers", "native"))
    right = logits(folder, native, TOKENS, kernels="native")
    for split in splits:
        found = logits(folder, ours, TOKENS, kernels="native", **split)
        torch.testing.assert_close(found, right, **CLOSE)
    assert check_bytes(folder).weights_bytes == load(folder, "native").weights_bytes


@pytest.mark.parametrize(
    ("name", "more"),
    [("lfm2", ("in_proj", "out_proj")), slow("minimax", ("qkv_proj", "out_proj", "output_gate"))],
    ids=["lfm2", "minimax"],
)
def test_a_class_that_runs_by_its_own_code(
    name: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Here one whose own code computes a state."""
    source = made(tiny(CONFIG_MAPPING[name]), tmp_path / "source")
    folder = packed(source, tmp_path / "a", W4A16, more)
    ours, dense = (read_spec(tmp_path / each, "auto", {}) for each in ("a", "a-dense"))
    tokens = TOKENS % ours.vocab_size
    right = logits(tmp_path / "a-dense", dense, tokens)
    torch.testing.assert_close(logits(folder, ours, tokens), right, **CLOSE)
    assert check_bytes(folder).weights_bytes < load(tmp_path / "a-dense", "auto").weights_bytes


def test_the_matrix_of_latents_is_dequantized(tmp_path: Path) -> None:
    """Heads apply parts of it to queries and sums, not to its inputs."""
    sizes = {"q_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}
    config = DeepseekV32Config(**{**INDEXED["deepseek-v3.2"].to_dict(), **sizes})
    source = made(config, tmp_path / "source")
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    kept = {**W4A16, "ignore": [*W4A16["ignore"], r"re:.*\.indexer\..*"]}
    folder = packed(source, tmp_path / "a", kept, names)
    ours, dense = (read_spec(tmp_path / each, "auto", {}) for each in ("a", "a-dense"))
    right = logits(tmp_path / "a-dense", dense, TOKENS)
    for split in ({}, {"tp": 2}):
        torch.testing.assert_close(logits(folder, ours, TOKENS, **split), right, **CLOSE)
    assert check_bytes(folder).weights_bytes < load(tmp_path / "a-dense", "auto").weights_bytes


@pytest.mark.slow
def test_a_graph_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class's own code then runs, with packed weights."""
    folder = packed(MODELS / "llama-gqa", tmp_path / "a", W4A16)
    spec = read_spec(folder, "transformers", {})
    right = logits(folder, spec, TOKENS)
    monkeypatch.setattr(hf_model, "difference", lambda *_: "a step differs by 0.5")
    torch.testing.assert_close(logits(folder, spec, TOKENS), right, **CLOSE)


@pytest.mark.slow
def test_a_gguf_file(tmp_path: Path) -> None:
    """Some of its projections are of a type that is dequantized."""

    def choose(name: str) -> str:
        return "Q4_1" if "v_proj" in name or "1.mlp.down" in name else "Q4_0"

    file = write_gguf(MODELS / "qwen2", tmp_path / "a.gguf", choose)
    folder = Path(
        resolve_model(ModelConfig(model=str(file), model_impl="transformers")).model or ""
    )
    ours = read_spec(folder, "transformers", {})
    assert ours.quantization is not None and ours.quantization.bits == 4
    check_bytes(folder)
    dense = write_gguf(MODELS / "qwen2", tmp_path / "b.gguf", choose, tmp_path / "dense")
    right = logits(dense.with_name("dense"), read_spec(tmp_path / "dense", "native", {}), TOKENS)
    torch.testing.assert_close(logits(folder, ours, TOKENS), right, **CLOSE)


def test_uses_that_need_unpacked_weights_are_refused(tmp_path: Path) -> None:
    folder = packed(MODELS / "llama-gqa", tmp_path / "a", W4A16)
    spec = read_spec(folder, "transformers", {})
    with pytest.raises(ConfigError, match="needs an unquantized checkpoint"):
        spec.quantized("int8")
    config = ModelConfig(model=str(folder), load_format="dummy")
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32)
    with pytest.raises(ConfigError, match="--load-format dummy cannot make"):
        load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))
    config = tiny(CONFIG_MAPPING["sarvam_moe"])
    folder = packed(made(config, tmp_path / "b"), tmp_path / "c", W4A16, ("query_key_value",))
    with pytest.raises(ConfigError, match=r"query_key_value has packed weights.*not quantized"):
        load(folder, "transformers")
