"""Models whose layers keep different parts of the KV: windows, latents and states, in clusters (of
windows and states in one node there is more in `tests/common/node`)."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import RwkvConfig

import reference
from cluster import node_metrics
from exact import Asker, check_prompt_logprobs
from pdserve.common.model.implementation import read_spec
from thinned import slow
from tiny_engine import some_tokens
from warm import WarmCluster, run_roles, shared
from windowed import make_windowed

LENGTHS = (30, 150, 220, 300)
PROMPTS = [tuple(some_tokens(length, seed=length)) for length in LENGTHS]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = make_windowed(name, tmp_path_factory.mktemp(name))
        return made[name]

    return model


def check(cluster: WarmCluster, model: Path) -> None:
    """Answers are transformers', whether or not the prompts are in the cache."""
    asker = Asker(cluster)
    for prompt in PROMPTS:
        assert tuple(asker.ids(prompt)) == reference.greedy(model, prompt, 17)


def test_a_node_of_both_roles_serves_the_full_context(models: Any) -> None:
    model = models("qwen3")
    with WarmCluster(model, 0, 0, max_model_len=1024) as cluster:
        cluster.start_node("both", tensor_parallel_size=2)
        cluster.wait_nodes()
        check(cluster, model)  # cold
        check(cluster, model)
        check_prompt_logprobs(cluster, PROMPTS[1], n=2)


TP1, TP2 = {"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
PP2_OF_3 = {**PP2, "pipeline_partition": "2,4"}  # layers with an indexer count as two
TRANSFORMERS = {
    "qwen3-next": "qwen3_next.modeling_qwen3_next",
    "deepseek-v3.2": "deepseek_v32.modeling_deepseek_v32",
}


@pytest.mark.parametrize(
    ("name", "connector", "prefill", "decode"),
    [
        ("qwen3", "tcp", TP2, TP1),
        ("deepseek", "shm", PP2, TP2),
        slow("gemma3", "shm", TP1, TP1),
        ("qwen3-next", "tcp", TP2, TP1),  # through transformers, as many below
        slow("qwen3-next", "shm", PP2, TP2),
        slow("qwen3-next", "tcp", TP1, PP2),
        slow("qwen3.5", "shm", TP2, TP1),
        slow("deepseek-v3.2", "tcp", TP2, TP1),
        slow("deepseek-v3.2", "shm", PP2_OF_3, {**TP2, "expert_parallel_size": 2}),
        slow("nemotron-h", "tcp", TP2, TP1),
        slow("falcon-h1", "tcp", PP2, TP2),
        ("mamba", "tcp", TP1, TP1),  # states alone
        slow("mamba", "shm", PP2, TP2),
        slow("falcon-mamba", "tcp", PP2, TP2),
        slow("falcon-mamba", "shm", TP2, TP1),
        slow("mamba2", "tcp", TP2, PP2),
        slow("lfm2", "shm", TP1, PP2),
        slow("gemma4", "tcp", TP2, TP1),
        slow("llama4", "tcp", TP2, PP2),
        slow("gpt-oss", "shm", {**TP2, "expert_parallel_size": 2}, PP2),
        slow("gpt2", "tcp", PP2, TP2),
        slow("bart", "tcp", TP2, PP2),
        slow("bloom", "shm", PP2, TP2),
        slow("qwen3", "shm", PP2, TP2),
        slow("qwen2", "shm", TP1, PP2),
        slow("mistral", "tcp", TP2, TP1),
        slow("deepseek", "tcp", TP2, TP1),
        slow("deepseek", "shm", TP1, {**TP2, "expert_parallel_size": 2}),
    ],
)
def test_a_hand_over(
    models: Any, name: str, connector: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """The blocks of a window that the next tokens read are moved, one number for all heads of a
    latent, the last state and that at the end of the last full block before; no more."""
    model = models(name)
    if name in TRANSFORMERS:  # each process would import it
        shared().load(f"transformers.models.{TRANSFORMERS[name]}", "pdserve.common.model.hf.model")
    with WarmCluster(model, 0, 0, max_model_len=1024) as cluster:
        cluster.start_node("prefill", kv_connector=connector, **prefill)
        start_decode(cluster, kv_connector=connector, **decode)
        cluster.wait_nodes()
        check(cluster, model)
        ranks = decode.get("tensor_parallel_size", 1)
        expected = sum(kv_bytes(model, length, ranks) for length in LENGTHS)
        for node in cluster.nodes("decode"):
            assert node_metrics(node)["pdserve_kv_transfer_bytes_total"] == expected
        check(cluster, model)  # from the cache
        check_prompt_logprobs(cluster, PROMPTS[1], n=2)
        if name in FAILOVER and prefill is TP2:
            start_decode(cluster, kv_connector=connector, **decode)
            cluster.wait_nodes()
            check_failover(cluster, model, count=120)


FAILOVER = ("deepseek-v3.2", "gemma4", "nemotron-h")


def kv_bytes(model: Path, length: int, ranks: int = 1) -> int:
    """The float32 KV that a decode node needs of a prompt: a head is on one rank, and on all of
    them if it is the only one."""
    total = 0
    for group in read_spec(model, "auto", {}).kv_groups:
        blocks = -(-length // BLOCK_SIZE) - group.first_kept(length, BLOCK_SIZE)
        heads = max(group.num_kv_heads, ranks)
        numbers = group.planes * heads * prod(group.page(BLOCK_SIZE))
        total += blocks * len(group.layers) * numbers * 4
    return total


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("qwen3", TP2, TP1),
        slow("deepseek", TP1, TP1),
        slow("mistral", TP1, TP1),
        slow("gemma3", PP2, TP2),
        slow("falcon-h1", PP2, TP2),
        slow("falcon-mamba", TP1, TP1),
        slow("nemotron-h", TP1, TP1),
        slow("qwen3-next", PP2, PP2),
    ],
)
def test_a_decode_node_dies_beyond_the_window(
    models: Any, name: str, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    model = models(name)
    with WarmCluster(model, 0, 0, max_model_len=1024) as cluster:
        cluster.start_node("prefill", **prefill)
        for _ in range(2):
            start_decode(cluster, **decode)
        cluster.wait_nodes()
        check_failover(cluster, model, count=200)


def start_decode(cluster: WarmCluster, **options: Any) -> None:
    """Starts a node that can be held, if it has one rank."""
    sizes = (options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    start = cluster.start_held if {*sizes} == {1} else cluster.start_node
    start("decode", **options)


def check_failover(cluster: WarmCluster, model: Path, count: int) -> None:
    """Kills a decode node while it computes `count` tokens: nodes of one rank wait for it, others
    have enough to do."""
    texts, prompt = [], PROMPTS[2]
    with ExitStack() as holding:
        holding.enter_context(cluster.standing_still("decode", steps=20))
        for event in cluster.stream(list(prompt), max_tokens=count, ignore_eos=True):
            texts.append(event["choices"][0]["text"])
            if len(texts) == 1:  # one event may have all tokens that there are
                cluster.kill(cluster.busy("decode"))
                holding.close()
    expected = reference.greedy(model, prompt, count)
    assert "".join(texts) == reference.decode(model, expected)


def test_models_that_cannot_run_are_refused_at_start(models: Any, tmp_path: Path) -> None:
    rwkv = tmp_path / "rwkv"
    RwkvConfig(vocab_size=512, architectures=["RwkvForCausalLM"]).save_pretrained(rwkv)
    flags = ("--router", "127.0.0.1:9", "--device", "cpu", "--model")
    gemma, states = str(models("gemma3")), str(models("lfm2"))
    ended = run_roles(
        tmp_path,
        [
            ("decode_node", *flags, str(rwkv)),
            ("decode_node", *flags, states, "--quantization", "int8"),
            ("decode_node", *flags, gemma, "--model-impl", "native"),
        ],
    )
    said = (
        "RwkvForCausalLM takes no positions",
        "--quantization int8: Lfm2ForCausalLM has recurrent layers",
        "architecture Gemma3ForCausalLM is not supported",
    )
    for (code, text), expected in zip(ended, said, strict=True):
        assert code == 2 and expected in text
