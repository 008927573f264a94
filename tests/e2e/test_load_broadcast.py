"""Nodes of which only the first rank's host has the model (--load-broadcast)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import reference
from exact import prompts
from paths import MODELS
from warm import WarmCluster, run_roles

MODEL = "llama-gqa"
NUM_TOKENS = 12
ELSEWHERE = ("elsewhere:later_ranks",)
DRAFT = {"method": "draft_model", "model": str(MODELS / "mistral"), "num_speculative_tokens": 3}


def check(cluster: WarmCluster) -> None:
    for case in prompts(cluster.model)[::3]:
        answer = cluster.complete(list(case), max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = reference.greedy(cluster.model, case, NUM_TOKENS)
        assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


def test_ranks_without_the_model() -> None:
    """Tensor-parallel ranks hand over to stages, the last of which reads the tokenizer."""
    with WarmCluster(MODEL, 0, 0, load_broadcast="") as cluster:
        cluster.start_node("prefill", ELSEWHERE, tensor_parallel_size=2)
        cluster.start_node("decode", ELSEWHERE, pipeline_parallel_size=2)
        cluster.wait_nodes()
        check(cluster)
        answer = cluster.complete([5, 6, 7], max_tokens=8, structured_outputs={"choice": ["yes"]})
        assert answer["choices"][0]["text"] == "yes"
        cluster.wait_idle()


@pytest.mark.slow
def test_ranks_without_the_draft_model() -> None:
    draft = {"speculative_config": json.dumps(DRAFT)}
    with WarmCluster(MODEL, 0, 0, load_broadcast="") as cluster:
        cluster.start_node("both", ELSEWHERE, tensor_parallel_size=2, **draft)
        cluster.wait_nodes()
        check(cluster)
        cluster.wait_idle()


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def drop(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (truncate, "model.safetensors is not a safetensors file"),
        (drop, "tensors missing: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_checkpoint_that_cannot_be_read(
    spoil: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    shutil.copytree(MODELS / MODEL, tmp_path / "model")
    spoil(tmp_path / "model")
    flags = ["--load-broadcast", "--tensor-parallel-size", "2", "--dtype", "float32"]
    role = ["decode_node", "--model", str(tmp_path / "model"), "--router", "127.0.0.1:1", *flags]
    ((code, log),) = run_roles(tmp_path, [role])
    assert code == 2
    assert sentence in log.splitlines()[-1]


def test_the_reader_is_killed_while_it_reads() -> None:
    with WarmCluster(MODEL, 0, 0) as cluster:
        dying = ("elsewhere:dying_reader", "7")
        options = {"tensor_parallel_size": 2, "load_broadcast": "", "distributed_timeout": 600}
        name = cluster.start_node("decode", dying, **options)
        pid = cluster.pids.pop(name)
        cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
        assert cluster.exit_code(pid) == 1
        said = [line for line in cluster.log().splitlines() if "rank 0" in line]
        assert any("was killed by SIGKILL" in line or "is gone" in line for line in said), said


@pytest.mark.slow
def test_a_full_disk_under_the_temporary_folder() -> None:
    with WarmCluster(MODEL, 0, 0) as cluster:
        options = {"tensor_parallel_size": 2, "load_broadcast": ""}
        name = cluster.start_node("decode", ("elsewhere:full_disk",), **options)
        pid = cluster.pids.pop(name)
        cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
        assert cluster.exit_code(pid) == 2
        last = cluster.log().splitlines()[-1]
        assert "/pdserve-" in last and "No space left on device: free some space there" in last


def test_adapters_are_not_sent(tmp_path: Path) -> None:
    role = ["decode_node", "--model", str(MODELS / MODEL), "--router", "127.0.0.1:1"]
    ((code, log),) = run_roles(tmp_path, [[*role, "--load-broadcast", "--enable-lora"]])
    assert code == 2
    assert "--load-broadcast does not send adapters" in log
