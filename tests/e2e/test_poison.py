"""Requests that no node can compute, beside streams that do not notice: no node ends, and nothing
stays behind. Tensor-parallel prefill, and a pipeline that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reference
from benchmarks.soak.asks import POISON
from benchmarks.soak.poisoned import poisoned
from cluster import MODELS, node_metrics
from warm import WarmCluster

NUM_TOKENS = 60
STEADY = [tuple(5 + (37 * k + 7 * i) % 480 for i in range(20 + 30 * k)) for k in range(3)]
FORCED = {"logit_bias": {str(POISON): 100}, "max_tokens": 8, "ignore_eos": True}
POISONS: list[tuple[list[int], dict[str, Any]]] = [
    ([7, 8, POISON, 9], {}),  # the prefill node's row
    ([POISON], {"temperature": 1, "n": 2}),
    ([7, 8, 9], FORCED),  # the decode node's: the first token is the poison
    ([7, 8, 11], {**FORCED, "n": 3, "temperature": 1, "logprobs": 1}),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCluster]:
    model = poisoned(MODELS / "mistral", tmp_path_factory.mktemp("poison") / "mistral")
    options = {"router": {"breaker_failures": 1000}}
    with WarmCluster(str(model), 0, 0, **options) as made:
        made.start_node("prefill", tensor_parallel_size=2)
        made.start_node("decode", pipeline_parallel_size=2)
        made.wait_nodes()
        yield made


def steady(cluster: WarmCluster, prompt: tuple[int, ...]) -> str:
    answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def poison(cluster: WarmCluster, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """The error a client is given."""
    response = cluster.post("/v1/completions", prompt=prompt, **options)
    error: dict[str, Any] = response.json()["error"]
    assert response.status_code == 500, response.text
    return error


def test_a_poisoned_request_ends_alone(cluster: WarmCluster) -> None:
    expected = {}
    for prompt in STEADY:  # of the checkpoint that is not poisoned
        tokens = reference.greedy(MODELS / "mistral", prompt, NUM_TOKENS)
        assert POISON not in tokens
        expected[prompt] = reference.decode(MODELS / "mistral", tokens)
    before = dict(cluster.pids)
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(steady, cluster, prompt) for prompt in STEADY * 2]
        bad = [pool.submit(poison, cluster, *each) for each in POISONS]
        errors = [each.result() for each in bad]
        assert [each.result() for each in good] == [expected[prompt] for prompt in STEADY] * 2
    # A retry on the same node may come before that has given the transfer up.
    assert {each["code"] for each in errors} <= {"sequence_failed", "poison_request", "stale_epoch"}
    cluster.wait_idle()
    assert cluster.pids == before and not cluster.crashed()
    cluster.wait_nodes()
    for node in cluster.nodes():
        assert node_metrics(node)["pdserve_sequences_failed_total"] > 0
    for prompt in STEADY:  # in blocks that the poison was in
        assert steady(cluster, prompt) == expected[prompt]
