"""Quantized weights through real servers: the tokens are those of the same weights in this
process, and nodes with other weights of the same model are not paired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import reference
from adapters import make_adapter, merged
from benchmarks.quantized_folder import Scheme, quantize_folder
from cluster import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.implementation import read_spec
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.planning.kv_budget import format_bytes
from slow_quantization import dequantized_folder
from stored_folders import SCALED, folders, scaled
from sweep import rounded_model
from tiny_engine import CPU, greedy, single_threaded_inference
from warm import WarmCluster, shared

LLAMA = MODELS / "llama-gqa"
PROMPTS = [tuple(range(5, 75)), (7, 300, 41), tuple(range(3, 500, 3))]
NUM_TOKENS = 24


def load(folder: Path, quantization: str | None = None) -> CausalLM:
    config = ModelConfig(model=str(folder), quantization=quantization)
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32)
    return load_model(ModelSpec.from_folder(folder), config, sharding)


def expected(model: CausalLM, folder: Path) -> list[str]:
    """Returns what this process says, without servers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with single_threaded_inference():
        tokens = [greedy(model, list(each), NUM_TOKENS, list(range(16))) for each in PROMPTS]
    return [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]


def answers(cluster: WarmCluster, **more: Any) -> list[str]:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    asked = [cluster.complete(list(each), **options) for each in PROMPTS]
    return [each["choices"][0]["text"] for each in asked]


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    folder = quantize_folder(LLAMA, tmp_path / "quantized", Scheme("gptq", desc_act=True))
    with WarmCluster(folder, 0, 0) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        assert answers(cluster) == expected(load(folder), folder)
        cluster.wait_idle()


def test_a_checkpoint_that_is_dequantized(tmp_path: Path) -> None:
    """The tokens are those of transformers with the weights that the FP8 file stands for."""
    kind = SCALED["blocks"]
    folder = folders(LLAMA, tmp_path / "fp8", kind, lambda matrix, _: scaled(matrix, "blocks"))
    dense = tmp_path / "fp8-dense"
    right = [reference.greedy(dense, each, NUM_TOKENS) for each in PROMPTS]
    with WarmCluster(folder, 0, 0) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        assert answers(cluster) == [reference.decode(dense, each) for each in right]
        said = "the weights are stored as FP8 in blocks of 48×32 and dequantized to float32"
        assert cluster.log().count(said) == 2
        cluster.wait_idle()


@pytest.mark.slow
def test_an_adapter_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Its text is that of the weights' values, read by another reader, with the adapter in them."""
    scheme = Scheme("awq", group_size=64)
    folder = quantize_folder(LLAMA, tmp_path / "quantized", scheme)
    dense = dequantized_folder(folder, tmp_path / "dense", scheme)
    adapter = make_adapter(tmp_path / "adapter", LLAMA, seed=1)
    models = {folder.name: dense, "a": merged(adapter, dense, tmp_path / "merged")}
    options = {"enable_lora": "", "lora_modules": f"a={adapter}"}
    with WarmCluster(folder, 0, 0, router=options, **options) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        said = {}
        for name, model in models.items():
            right = [reference.greedy(model, each, NUM_TOKENS) for each in PROMPTS]
            assert min(reference.margin(model, each, NUM_TOKENS) for each in PROMPTS) > 1e-2
            said[name] = answers(cluster, model=name)
            assert said[name] == [reference.decode(model, each) for each in right]
        assert not {*said["a"]} & {*said[folder.name]}
        cluster.wait_idle()


@pytest.mark.slow
def test_a_class_of_transformers_in_int8(tmp_path: Path) -> None:
    """The tokens are transformers' own with the rounded weights, over unequal layouts."""
    folder, rounded = MODELS / "qwen3", tmp_path / "rounded"
    model, tokenizer = reference.load.__wrapped__(folder)  # a copy of its own: it is changed
    rounded_model(model, read_spec(folder, "transformers", {})).save_pretrained(rounded)
    tokenizer.save_pretrained(rounded)
    assert min(reference.margin(rounded, each, NUM_TOKENS) for each in PROMPTS) > 1e-2
    right = [reference.greedy(rounded, each, NUM_TOKENS) for each in PROMPTS]
    assert right != [reference.greedy(folder, each, NUM_TOKENS) for each in PROMPTS]
    options = {"quantization": "int8", "model_impl": "transformers"}
    shared().load("transformers.models.qwen3.modeling_qwen3", "pdserve.common.model.hf.model")
    with WarmCluster(folder, 0, 0, **options) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        assert answers(cluster) == [reference.decode(rounded, each) for each in right]
        cluster.wait_idle()


@pytest.mark.slow
def test_a_packed_checkpoint_in_a_class_of_transformers(tmp_path: Path) -> None:
    """The tokens are those of the native path, over unequal layouts."""
    folder = quantize_folder(LLAMA, tmp_path / "quantized", Scheme("awq", group_size=64))
    model = load(folder)
    shared().load("transformers.models.llama.modeling_llama", "pdserve.common.model.hf.model")
    with WarmCluster(folder, 0, 0, model_impl="transformers") as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        assert answers(cluster) == expected(model, folder)
        cluster.wait_idle()


def test_int8_nodes_work_with_each_other_only() -> None:
    folder = MODELS / "qwen2-moe"  # a layer without experts, the others with a shared one too
    with WarmCluster(folder, 0, 0) as cluster:
        prefill = cluster.start_node("prefill", quantization="int8")
        decode = cluster.start_node("decode", quantization="int8", tensor_parallel_size=2)
        cluster.start_node("prefill")
        cluster.wait_nodes()
        state = cluster.state()
        names = {node["node_id"]: node["name"] for node in state["nodes"]}
        pairs = [(names[each["prefill"]], names[each["decode"]]) for each in state["pairings"]]
        assert pairs == [(prefill, decode)]
        model = load(folder, "int8")
        assert answers(cluster) == expected(model, folder)
        assert f"loading weights: 100 % of {format_bytes(model.weights_bytes)}" in cluster.log()
        cluster.wait_idle()
