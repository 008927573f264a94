"""The decoder against transformers, and against itself: alone, chunked, batched, split."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from crowd import Crowd, CrowdMember
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from tiny_engine import (
    BLOCK_SIZE,
    CPU,
    NUM_BLOCKS,
    greedy,
    load,
    new_cache,
    some_tokens,
    step,
)

pytestmark = pytest.mark.usefixtures("inference")

TRAINED = ["llama-gqa", "mistral", "qwen2", "qwen3"]
SPARSE = ["mixtral", "qwen2-moe", "qwen3-moe"]
PROMPT = "Once upon a time there was"
NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
KERNELS = ["torch", pytest.param("native", marks=NEEDS_COMPILER)]


# ---- against transformers ----


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", [*TRAINED, *SPARSE])
def test_greedy_tokens_equal_those_of_transformers(name: str, kernels: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(MODELS / name).encode(PROMPT)
    output = reference.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    table = [9, 3, 7, 1]  # 64 slots, in no order
    model = load(MODELS / name, kernels=kernels)
    assert greedy(model, prompt, 40, table) == output[0, len(prompt) :].tolist()


LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, rope_parameters=LINEAR),
        LlamaConfig(**SMALL, rope_parameters=YARN),
        LlamaConfig(**SMALL, rope_parameters=LONGROPE),
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SMALL, head_dim=48, tie_word_embeddings=True),
        LlamaConfig(**{**SMALL, "num_key_value_heads": 1}),
        Qwen3Config(**SMALL, head_dim=32),
    ],
    ids=[
        "linear-rope",
        "yarn",
        "longrope",
        "biases",
        "wide-heads-tied",
        "multi-query",
        "head-norms",
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_those_of_transformers(config: Any, kernels: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = some_tokens(40, vocab=101)
    with torch.inference_mode(False), torch.no_grad():
        reference = AutoModelForCausalLM.from_config(config).eval()
        for parameter in reference.parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1: leaving one out must show
                parameter.add_(torch.randn_like(parameter) * 0.2)
        reference.save_pretrained(tmp_path)
        expected = reference(torch.tensor([tokens])).logits[0]
    model = load(tmp_path, kernels=kernels)
    logits = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# ---- the paged cache ----


@pytest.fixture(scope="module", params=KERNELS)
def llama(request: pytest.FixtureRequest) -> CausalLM:
    return load(MODELS / "llama-gqa", kernels=request.param)


@pytest.mark.parametrize("cuts", [[20], [16, 32], [1, 2, 3, 37], list(range(1, 40))])
def test_a_chunked_prefill_equals_a_whole_one(llama: CausalLM, cuts: list[int]) -> None:
    tokens, table = some_tokens(40), [5, 0, 2]
    whole = step(llama, new_cache(llama), [(tokens, 0, table)])
    cache = new_cache(llama)
    edges = [0, *cuts, len(tokens)]
    parts = [
        step(llama, cache, [(tokens[start:end], start, table)]) for start, end in pairwise(edges)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


def test_sequences_in_one_step_do_not_touch_each_other(llama: CausalLM) -> None:
    """Decodes of several lengths, a later chunk and a fresh prompt together equal each alone,
    though everything they do not own is NaN, and so was what they own: a block's last owner may
    have left that."""
    lengths, queries = [1, 5, 17, 33, 200, 40, 30], [1, 1, 1, 1, 1, 12, 30]
    alone, together, sequences = [], new_cache(llama), []
    together[0].fill_(float("nan"))
    free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
    for seed, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        tokens = some_tokens(length, seed)
        # One block more than is needed: reserved for later tokens, and never read.
        table = [next(free) for _ in range(-(-length // BLOCK_SIZE) + 1)]
        if length > count:
            step(llama, together, [(tokens[:-count], 0, table)])
        sequences.append((tokens[-count:], length - count, table))
        alone.append(step(llama, new_cache(llama), [(tokens, 0, table)])[-count:])
    torch.testing.assert_close(
        step(llama, together, sequences), torch.cat(alone), rtol=1e-4, atol=1e-4
    )


def test_only_the_mapped_slots_are_written(llama: CausalLM) -> None:
    cache = new_cache(llama)
    step(llama, cache, [(some_tokens(18), 0, [3, 8])])
    written = cache[0].ne(0).flatten(3, 3).any(-1).any(3).all(0).all(0)  # [block, slot]
    expected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    expected[3], expected[8, :2] = True, True
    assert torch.equal(written, expected)


# ---- tensor parallelism ----


def split_logits(size: int, build: Callable[[Any], CausalLM]) -> list[torch.Tensor]:
    def work(member: Any) -> torch.Tensor:
        model = build(member)
        cache, table = new_cache(model), [6, 2]
        step(model, cache, [(some_tokens(20), 0, table)])
        return step(model, cache, [([7], 20, table)])

    return Crowd(size).run(work)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("size", [2, 4])  # 4 ranks replicate each of the 2 KV heads
def test_a_split_model_equals_the_whole(name: str, size: int) -> None:
    whole = split_logits(1, lambda member: load(MODELS / name, member))[0]
    for logits in split_logits(size, lambda member: load(MODELS / name, member)):
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    """With biases too: a row-parallel bias must be added once."""
    spec = replace(
        ModelSpec.from_folder(MODELS / "llama-gqa"), vocab_size=509, o_bias=True, mlp_bias=True
    )
    config = ModelConfig(load_format="dummy")

    def build(member: Any) -> CausalLM:
        return load_model(spec, config, Sharding(member, CPU, torch.float32))

    whole = split_logits(1, build)[0]
    assert whole.shape == (1, 509)
    for logits in split_logits(4, build):
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_split_that_does_not_fit_is_refused() -> None:
    spec = ModelSpec.from_folder(MODELS / "llama-gqa")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 does not divide.* 4 heads"):
        CausalLM(spec, Sharding(CrowdMember(Crowd(3), 0), CPU, torch.float32))
