"""--rope-scaling and --hf-overrides through real servers: the tokens are transformers' with the
same settings, beyond the length that config.json has, and nodes with others are not paired."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import reference
from cluster import MODELS
from tiny_engine import some_tokens
from warm import WarmCluster

LLAMA = MODELS / "llama-gqa"
YARN = {"rope_type": "yarn", "factor": 12.0, "original_max_position_embeddings": 128}
PROMPTS = [tuple(some_tokens(length, seed=length)) for length in (60, 1200)]
NUM_TOKENS = 24


def test_yarn_beyond_the_length_in_config_json(tmp_path: Path) -> None:
    scaled = Path(shutil.copytree(LLAMA, tmp_path / LLAMA.name))
    config = json.loads((scaled / "config.json").read_bytes())
    config["rope_parameters"].update(YARN)
    (scaled / "config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    flags = {"rope_scaling": json.dumps(YARN), "hf_overrides": '{"bos_token_id": 1}'}
    with WarmCluster(LLAMA, 0, 0, router=flags) as cluster:
        prefill = cluster.start_node("prefill", **flags, tensor_parallel_size=2)
        decode = cluster.start_node("decode", **flags)
        cluster.start_node("prefill", **{**flags, "rope_theta": 1000.0})
        cluster.wait_nodes()
        state = cluster.state()
        names = {node["node_id"]: node["name"] for node in state["nodes"]}
        pairs = [(names[each["prefill"]], names[each["decode"]]) for each in state["pairings"]]
        assert pairs == [(prefill, decode)]
        for prompt in PROMPTS:
            answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
            expected = reference.greedy(scaled, prompt, NUM_TOKENS)
            assert answer["choices"][0]["text"] == reference.decode(scaled, expected)
        cluster.wait_idle()
