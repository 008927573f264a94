"""Clusters on GPUs, as `tests/e2e` has them on CPUs. Those of one card share it: two processes,
each with its part of the memory, and KV goes from one to the other."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from cluster import Cluster
from exact import NUM_TOKENS, Asker, check_exact, prompts
from tiny_engine import some_tokens
from windowed import make_windowed

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
# Of a token's logit below the best one, as float32 on a CPU computes both: bfloat16 has 8 bits.
ROUNDING = 0.5


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cuda", "gpu_memory_utilization": 0.5, **more}


@pytest.mark.parametrize("connector", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("model", ["llama-gqa", "qwen3-moe"])
def test_float32_is_exact(model: str, connector: str) -> None:
    with Cluster(model, **options(dtype="float32", kv_connector=connector)) as cluster:
        check_exact(cluster, prompts(cluster.model), range(0, 16, 3))


@pytest.mark.parametrize("connector", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("model", ["qwen3", "deepseek", "qwen3-next"])
def test_windows_latents_and_states(model: str, connector: str, tmp_path: Path) -> None:
    folder = make_windowed(model, tmp_path)
    flags = options(dtype="float32", kv_connector=connector, max_model_len=1024)
    with Cluster(folder, **flags) as cluster:
        asker = Asker(cluster)
        for length in (30, 150, 300):
            prompt = tuple(some_tokens(length, seed=length))
            assert tuple(asker.ids(prompt)) == reference.greedy(folder, prompt, NUM_TOKENS)
        asker.close()
        cluster.wait_idle()


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16", "kv_connector": "tcp"},
        {"dtype": "float16", "kv_connector": "cuda_ipc"},
        {"dtype": "bfloat16", "kv_connector": "tcp", "enforce_eager": True},
        {"dtype": "bfloat16", "kv_connector": "tcp", "cpu_kernels": "torch"},
        {"dtype": "bfloat16", "kv_connector": "tcp", "cuda_graph_sizes": "3,64"},
        pytest.param(
            {"dtype": "bfloat16", "kv_connector": "tcp", "prefill_tp": 2, "decode_tp": 2},
            marks=TWO_GPUS,
        ),
        pytest.param({"dtype": "bfloat16", "kv_connector": "tcp", "decode_pp": 2}, marks=TWO_GPUS),
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_half_precision_chooses_nearly_the_best(wide_model: Path, flags: dict[str, Any]) -> None:
    """With FlashInfer and CUDA graphs where it is installed."""
    folder = wide_model
    with Cluster(folder, **options(**flags)) as cluster:
        asker = Asker(cluster)
        for prompt in prompts(folder)[::3]:
            ids = asker.ids(prompt)
            assert shortfall(folder, prompt, ids) < ROUNDING, reference.decode(folder, ids)
        asker.close()
        cluster.wait_idle()


def shortfall(folder: Path, prompt: tuple[int, ...], answer: list[int]) -> float:
    """By how much the answer's tokens are worse than the best, at most."""
    model, _ = reference.load(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.amax(dim=1) - chosen).max())


def test_text_is_that_of_one_node_over_every_connector(wide_model: Path) -> None:
    """In bfloat16, prompt by prompt, so that all compute the same steps."""
    texts = {
        name: text_hash(wide_model, **flags)
        for name, flags in {
            "one node": {"both": 1},
            "cuda_ipc": {"kv_connector": "cuda_ipc"},
            "tcp": {"kv_connector": "tcp"},
        }.items()
    }
    assert len(set(texts.values())) == 1, texts


def text_hash(folder: Path, **flags: Any) -> str:
    """Hashes the answers' text alone: ids and times differ."""
    digest = hashlib.sha256()
    with Cluster(folder, **options(dtype="bfloat16", **flags)) as cluster:
        for prompt in prompts(folder)[::3]:
            answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
            digest.update(answer["choices"][0]["text"].encode())
    return digest.hexdigest()


@TWO_GPUS
@pytest.mark.parametrize("connector", ["nccl", "cuda_ipc", "tcp"])
def test_from_card_to_card(connector: str) -> None:
    with Cluster("llama-gqa", **options(dtype="float32", kv_connector=connector)) as cluster:
        check_exact(cluster, prompts(cluster.model), range(0, 16, 3))


@TWO_GPUS
@pytest.mark.parametrize("communicator", ["nccl", "symm_mem"])
def test_ranks_on_two_cards(communicator: str) -> None:
    ranks = {"prefill_tp": 2, "decode_pp": 2, "decode_tp": 1, "device_communicator": communicator}
    with Cluster("llama-gqa", **options(dtype="float32", **ranks)) as cluster:
        check_exact(cluster, prompts(cluster.model), range(0, 16, 3))


@pytest.mark.parametrize("communicator", ["nccl", *(["symm_mem"] if GPUS > 1 else [])])
def test_collectives_are_right(communicator: str) -> None:
    command = ["cluster-check", "--tp", str(max(GPUS, 1)), "--device-communicator", communicator]
    pdserve = Path(sys.executable).with_name("pdserve")
    done = subprocess.run([pdserve, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
