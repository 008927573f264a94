"""Nodes that keep KV in 8 bits: what they say is what one process says over such a cache, and a
hand-over moves a quarter of float32's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import node_metrics
from exact import Asker
from paths import MODELS
from pdserve.common.model.implementation import read_spec
from thinned import slow
from tiny_engine import greedy, load, single_threaded_inference, some_tokens
from warm import WarmCluster, run_roles
from windowed import make_windowed

# Lengths, and seeds for which the best two logits of every token are 0.02 apart at least.
SEEDS = {30: 8, 90: 4, 150: 15, 220: 26, 300: 6}
PROMPTS = [tuple(some_tokens(length, seed=seed)) for length, seed in SEEDS.items()]
BLOCK_SIZE, NUM_TOKENS = 16, 17


def alone(model: Path, kind: str) -> list[list[int]]:
    with single_threaded_inference():
        made = load(model, kernels="native", kv_cache_dtype=kind)
        return [greedy(made, list(prompt), NUM_TOKENS, list(range(64))) for prompt in PROMPTS]


def kv_bytes(model: Path, length: int, kind: str) -> int:
    total = 0
    for group in read_spec(model, "auto", {}).kv_groups:
        blocks = -(-length // BLOCK_SIZE) - group.first_kept(length, BLOCK_SIZE)
        numbers, _ = group.row("float32", kind)
        total += blocks * BLOCK_SIZE * len(group.layers) * 2 * group.num_kv_heads * numbers
    return total


@pytest.mark.parametrize(
    ("name", "kind", "prefill", "decode"),
    [
        ("qwen3", "int8", {"tensor_parallel_size": 2}, {}),
        slow("qwen3", "fp8_e4m3", {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
        slow("mistral", "int8", {}, {"pipeline_parallel_size": 2}),
    ],
)
def test_a_hand_over(
    name: str, kind: str, prefill: dict[str, int], decode: dict[str, int], tmp_path: Path
) -> None:
    """With windows, other layouts, and what was sent before found in the cache."""
    model = make_windowed(name, tmp_path)
    expected = alone(model, kind)
    with WarmCluster(model, 0, 0, max_model_len=1024, kv_cache_dtype=kind) as cluster:
        cluster.start_node("prefill", **prefill)
        cluster.start_node("decode", **decode)
        cluster.wait_nodes()
        asker = Asker(cluster)
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert asker.ids(prompt) == tokens
        moved = sum(kv_bytes(model, length, kind) for length in SEEDS)
        (node,) = cluster.nodes("decode")
        assert node_metrics(node)["pdserve_kv_transfer_bytes_total"] == moved
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert asker.ids(prompt) == tokens
        cluster.wait_idle()


def test_latents_and_torch_kernels_are_refused(tmp_path: Path) -> None:
    latent = make_windowed("deepseek", tmp_path)
    common = ["--router", "127.0.0.1:1", "--kv-cache-dtype", "int8", "--device", "cpu"]
    given = {
        "caches latents": ["--model", str(latent)],
        "needs the native kernels": ["--model", str(MODELS / "qwen2"), "--cpu-kernels", "torch"],
    }
    roles = [["decode_node", *common, *more] for more in given.values()]
    for (code, log), sentence in zip(run_roles(tmp_path, roles), given, strict=True):
        assert code == 2
        assert sentence in log.splitlines()[-1]
