"""Tiny models of every class of transformers that `pdserve models` lists as exact, in clusters:
each over a hand-over by tcp, and twelve of them in unequal layouts with a decode node killed."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from paths import MODELS
from pdserve.cli.models import known_models
from sweep import classes_of, greedy, make
from tiny_engine import some_tokens
from warm import WarmCluster, shared

pytestmark = pytest.mark.slow

EXACT = [name for name, row in known_models().items() if row["result"] == "exact"]
TWELVE = (
    "gpt2", "opt", "gemma3_text", "gpt_oss", "phi3", "glm4_moe", "olmo3", "cohere2", "deepseek_v3",
    "qwen3_next", "llama4_text", "mistral",
)  # fmt: skip
PROMPT, TOKENS, KILLED = 60, 32, 150
CLOSE = 1e-3  # of two logits that rounding may exchange
TP1, TP2 = {"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}


def made(name: str, folder: Path) -> Any:
    """Writes the checkpoint, with a tokenizer; returns transformers' model."""
    model = make(*classes_of(name), folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "qwen3" / file, folder)
    shared().load("pdserve.common.model.hf.model")
    return model


def ids_of(choice: Any) -> list[int]:
    return [int(each.removeprefix("token_id:")) for each in choice["logprobs"]["tokens"]]


IDS = {"logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}


@pytest.mark.parametrize("name", EXACT)
def test_a_hand_over_by_tcp(name: str, tmp_path: Path) -> None:
    """32 greedy tokens, up to a choice too close to call, and the prompt's log-probabilities."""
    with torch.inference_mode(False):
        model = made(name, tmp_path)
    tokens, logits = greedy(model, TOKENS)
    prompt, expected = tokens[:PROMPT].tolist(), tokens[PROMPT:].tolist()
    best = logits[PROMPT - 1 : -1].topk(2).values
    sure = (best[:, 0] - best[:, 1] > CLOSE).tolist()
    count = sure.index(False) if False in sure else TOKENS
    with WarmCluster(tmp_path, kv_connector="tcp", max_model_len="auto") as cluster:
        asked = {**IDS, "max_tokens": TOKENS, "prompt_logprobs": 0}
        (choice,) = cluster.complete(prompt, **asked)["choices"]
    assert ids_of(choice)[:count] == expected[:count]
    assert count >= 4
    right = logits.log_softmax(-1)
    for place, entries in enumerate(choice["prompt_logprobs"][1:], 1):
        found = entries[str(prompt[place])]["logprob"]
        assert found == pytest.approx(right[place - 1, prompt[place]].item(), abs=1e-3)


@pytest.mark.parametrize("name", TWELVE)
@pytest.mark.parametrize(("prefill", "decode"), [(TP2, TP1), (PP2, TP2)], ids=["TP", "PP"])
def test_a_decode_node_is_killed(
    name: str, prefill: dict[str, int], decode: dict[str, int], tmp_path: Path
) -> None:
    with torch.inference_mode(False):
        made(name, tmp_path)
    prompt, got = [token % 125 + 3 for token in some_tokens(PROMPT, seed=1)], []
    expected, killed = reference.greedy(tmp_path, tuple(prompt), KILLED), ""
    with WarmCluster(tmp_path, 0, 0, kv_connector="tcp") as cluster, ExitStack() as holding:
        cluster.start_node("prefill", **prefill)
        for _ in range(2):
            start = cluster.start_held if decode is TP1 else cluster.start_node
            start("decode", **decode)
        cluster.wait_nodes()
        holding.enter_context(cluster.standing_still("decode", steps=20))
        for event in cluster.stream(prompt, max_tokens=KILLED, **IDS):
            got += ids_of(event["choices"][0])
            if not killed:
                killed = cluster.busy("decode")
                cluster.kill(killed)
                holding.close()
    assert killed and tuple(got) == expected
