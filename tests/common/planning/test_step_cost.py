"""FLOPs and bytes of a step, against what torch counts while a model computes one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import YoutuConfig

from paths import ROOT
from pdserve.common.core.kv_groups import STATE_WINDOW, LayerKV
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.step_shape import StepShape
from pdserve.common.model.stages import pipeline_stages
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.step_cost import Cost, StepCost
from tiny_engine import load, new_cache, single_threaded_inference, some_tokens, step

MODELS = ROOT / "tests" / "models"
DENSE = ("llama-gqa", "qwen2", "qwen3")
LATENTS = YoutuConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    vocab_size=101,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    architectures=["YoutuForCausalLM"],
).to_dict()


def cost_of(name: str, **footprint: int) -> StepCost:
    spec = ModelSpec.from_folder(MODELS / name)
    return StepCost.whole(Footprint(spec, "float32", **footprint))


@pytest.mark.parametrize("name", [*DENSE, "mixtral", "qwen2-moe", "qwen3-moe"])
def test_products_are_those_that_torch_counts(name: str) -> None:
    """All but attention, whose operator torch counts on no CPU."""
    with single_threaded_inference(), FlopCounterMode(display=False) as counter:
        model = load(MODELS / name)
        step(model, new_cache(model), [(some_tokens(7), 0, [1]), (some_tokens(1), 20, [2, 3])])
    counted = counter.get_flop_counts()["Global"]
    ours = cost_of(name).parts(StepShape.of([(0, 7), (20, 1)], sampled=8))
    products = sum(part.flops for name, part in ours.items() if name != "attention")
    # The gate of qwen2-moe's shared expert is one number of each token.
    assert sum(counted.values()) == pytest.approx(products, rel=2e-3)


def test_attention_multiplies_each_pair_twice_in_each_head() -> None:
    shape = StepShape.of([(10, 3)], sampled=0)
    assert (shape.tokens, shape.cached, shape.pairs) == (3, 10, 11 + 12 + 13)
    spec = ModelSpec.from_folder(MODELS / "llama-gqa")
    query, key = torch.zeros(1, spec.head_dim), torch.zeros(spec.head_dim, 1)
    with FlopCounterMode(display=False) as counter:
        weights = query @ key  # of one pair in one head
        weights @ key.T
    pairs = shape.pairs * spec.num_heads * spec.num_layers
    assert cost_of("llama-gqa").parts(shape)["attention"].flops == pairs * (
        counter.get_total_flops()
    )


def test_latents_are_attended_to_the_cheaper_way() -> None:
    """A decode absorbs its query; a prompt computes keys and values. Either costs each token one
    product with the up-projection."""
    spec, heads, layers = ModelSpec.from_config(LATENTS), 4, 3
    cost, up = StepCost.whole(Footprint(spec, "float32")), 2 * 32 * (16 + 12)
    decode = cost.parts(StepShape.of([(99, 1)], sampled=0))["attention"]
    assert decode.flops == heads * layers * (up + 2 * 100 * (32 + 8 + 32))
    assert decode.bytes == layers * 4 * (heads * up // 2 + 99 * (32 + 8))
    prompt = cost.parts(StepShape.of([(0, 100)], sampled=0))["attention"]
    assert prompt.flops == heads * layers * (100 * up + 2 * 5050 * (16 + 8 + 12))


@pytest.mark.parametrize("window", [1, 4, 11, 1000])
def test_a_window_s_pairs_and_tokens_are_counted_one_by_one(window: int) -> None:
    decodes, chunks = [0, 2, 30], [(0, 3), (1, 9), (40, 7)]
    shape = StepShape.empty([window])
    shape.add_step(decodes, chunks, sampled=0)
    cached = pairs = 0
    for start, length in [*((start, 1) for start in decodes), *chunks]:
        seen = [set(range(max(0, i - window + 1), i + 1)) for i in range(start, start + length)]
        pairs += sum(map(len, seen))
        cached += len(set().union(*seen) & set(range(start)))
    assert shape.windows == {window: (cached, pairs)}
    assert (shape - shape).windows == {window: (0, 0)}


def test_layers_with_windows_cost_what_they_see() -> None:
    """Two of four layers see 4 tokens."""
    spec = replace(ModelSpec.from_folder(MODELS / "llama-gqa"), layer_windows=(None, 4, 4, None))
    cost = StepCost.whole(Footprint(spec, "float32"))
    windowed = cost.parts(StepShape.of([(100, 1)], 0, [4]))["attention"]
    whole = cost_of("llama-gqa").parts(StepShape.of([(100, 1)], 0))["attention"]
    assert windowed.flops == whole.flops / 2 * (101 + 4) / 101
    assert windowed.bytes == whole.bytes / 2 * (100 + 3) / 100


@pytest.mark.parametrize("name", DENSE)
def test_every_matrix_is_read_once(name: str) -> None:
    model = load(MODELS / name)
    matrices = [shard.target for shard in model.shards() if shard.target.ndim == 2]
    shape = StepShape.of([(0, 1)], sampled=1)
    parts = cost_of(name).parts(shape)
    read = sum(parts[part].bytes for part in parts if part not in ("embedding", "KV write"))
    table = 0 if model.spec.tie_word_embeddings else model.embedding.weight.matrix.tensor.nbytes
    assert read == sum(each.nbytes for each in matrices) - table


def test_kv_is_read_once_and_written_once() -> None:
    cost = cost_of("llama-gqa")
    shape = StepShape.of([(100, 1), (0, 5)], sampled=2)
    per_token = cost.footprint.kv_per_token(cost.stage)
    assert cost.parts(shape)["attention"].bytes == 100 * per_token
    assert cost.parts(shape)["KV write"].bytes == 6 * per_token


def test_a_state_is_read_once_and_written_once_by_each_sequence() -> None:
    """Unless nothing came before, in two of four layers."""
    spec = ModelSpec.from_folder(MODELS / "llama-gqa")
    full, state = LayerKV(spec.num_kv_heads, spec.head_dim), LayerKV.of_state(2, 1000)
    cost = StepCost.whole(Footprint(replace(spec, layer_kv=(full, state, full, state)), "bfloat16"))
    parts = cost.parts(StepShape.of([(100, 1), (0, 5), (7, 9)], 0, [STATE_WINDOW]))
    per_token = cost.footprint.kv_per_token(cost.stage)
    assert per_token == 2 * 2 * spec.num_kv_heads * spec.head_dim * 2, "a state does not grow"
    nbytes = 2 * 2 * 1000 * 4  # in float32 whatever the dtype
    assert parts["attention"].bytes == 107 * per_token + 2 * nbytes
    assert parts["KV write"].bytes == 15 * per_token + 3 * nbytes


def test_experts_that_no_token_visits_are_not_read() -> None:
    cost = cost_of("mixtral")
    moe = cost.footprint.spec.moe
    one, many = (cost.parts(StepShape.of([(0, n)], 0))["experts"].bytes for n in (1, 1000))
    expert = cost.footprint.expert_weights(moe) * len(moe.sparse_layers)
    assert many - one == pytest.approx(expert * (moe.num_experts - moe.top_k), rel=1e-6)


def test_ranks_and_stages_share_a_step() -> None:
    spec = ModelSpec.from_folder(MODELS / "llama-gqa")
    shape = StepShape.of([(8, 4)], sampled=1)
    whole = cost_of("llama-gqa").total(shape)
    stages = [
        StepCost(Footprint(spec, "float32"), stage).total(shape)
        for stage in pipeline_stages(spec.num_layers, 2)
    ]
    assert sum(stages, Cost()) == whole
    half = cost_of("llama-gqa", tp=2).total(shape)
    assert half.flops == whole.flops / 2
    embedding = shape.tokens * spec.hidden_size * 4
    assert half.bytes - embedding == (whole.bytes - embedding) / 2
