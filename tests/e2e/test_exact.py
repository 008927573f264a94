"""Greedy output equals the reference, token for token, in every topology.

One cluster a topology; in it: prompts from one token to several chunks, whole and streamed,
one by one and sixteen at once, with a cold and a warm prefix cache.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

import reference
from cluster import Cluster, node_metrics
from story_grammar import make_corpus

NUM_TOKENS = 36
TINY = ("llama-gqa", "qwen2", "qwen3", "mistral")
TOPOLOGIES = list(itertools.product(TINY, (1, 2), (1, 2), ("shm", "tcp")))


def prompts(folder: Path) -> list[tuple[int, ...]]:
    """Sixteen prompts: 1, 2, 15, 16, 17 … tokens, up to several chunks of 64."""
    text = " ".join(make_corpus(seed=7, count=12, chat_share=0.0))
    ids = reference.encode(folder, text)
    lengths = (1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 150, 220, 300)
    starts = range(0, 7 * len(lengths), 7)
    return [
        tuple(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)
    ]


def whole(cluster: Cluster, prompt: tuple[int, ...]) -> str:
    answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return str(answer["choices"][0]["text"])


def streamed(cluster: Cluster, prompt: tuple[int, ...]) -> str:
    body = {
        "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    text = ""
    with requests.post(
        f"{cluster.url}/v1/completions", json=body, stream=True, timeout=60
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def check_exact(cluster: Cluster) -> None:
    folder = cluster.model
    cases = prompts(folder)
    expected = [
        reference.decode(folder, reference.greedy(folder, case, NUM_TOKENS)) for case in cases
    ]
    # Cold, one at a time, whole and streamed in turn.
    for index, (case, text) in enumerate(zip(cases, expected, strict=True)):
        ask = streamed if index % 2 else whole
        assert ask(cluster, case) == text, f"prompt of {len(case)} tokens\n{cluster.log()[-3000:]}"
    # All at once, with warm prefix caches, the other way round.
    with ThreadPoolExecutor(len(cases)) as pool:
        asks = [whole if index % 2 else streamed for index in range(len(cases))]
        answers = list(pool.map(lambda ask, case: ask(cluster, case), asks, cases))
    assert answers == expected
    for node in cluster.nodes():
        assert node_metrics(node)["pdserve:prefix_cache_hits_total"] > 0
    cluster.wait_idle()


@pytest.mark.parametrize(("model", "prefill_tp", "decode_tp", "connector"), TOPOLOGIES)
def test_greedy_output_equals_transformers(
    model: str, prefill_tp: int, decode_tp: int, connector: str
) -> None:
    with Cluster(
        model, prefill_tp=prefill_tp, decode_tp=decode_tp, kv_connector=connector
    ) as cluster:
        check_exact(cluster)


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_the_demo_model_equals_transformers(connector: str) -> None:
    embedded = pytest.importorskip("common.model.embedded")
    try:
        folder = embedded.ensure_embedded_model()
    except embedded.ConfigError as error:
        pytest.skip(str(error))
    with Cluster(folder, kv_connector=connector, max_model_len=1024) as cluster:
        check_exact(cluster)


def test_without_a_prefix_cache_the_tokens_are_the_same() -> None:
    with Cluster("llama-gqa", **{"no-enable-prefix-caching": ""}) as cluster:
        folder = cluster.model
        for case in prompts(folder)[-3:] * 2:
            expected = reference.greedy(folder, case, NUM_TOKENS)
            assert whole(cluster, case) == reference.decode(folder, expected)
        assert all(
            node_metrics(node)["pdserve:prefix_cache_hits_total"] == 0 for node in cluster.nodes()
        )
        cluster.wait_idle()
