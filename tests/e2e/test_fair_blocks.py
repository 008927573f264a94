"""One client fills the KV blocks of a decode node, and another one asks for short answers:
127.0.0.1 and 127.0.0.2 are two clients of a router without keys."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from test_fair_nodes import ANOTHER, GREEDY

from cluster import node_metrics
from warm import WarmCluster

BLOCKS, TOKENS = 64, 200  # an answer of the greedy client has a fifth of the blocks in the end
BODIES, PROMPTS = 2, 100
ANSWERS = 12
PREEMPTED, GENERATED = "pdserve_num_preemptions_total", "pdserve_generation_tokens_total"
LAYOUTS: dict[str, dict[str, int]] = {"apart": {"prefill": 1, "decode": 1}, "both": {"both": 1}}


def ask(
    cluster: WarmCluster, client: str, prompt: Any, max_tokens: int
) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(
        "127.0.0.1", cluster.ports["http"], timeout=300, source_address=(client, 0)
    )
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def answer(cluster: WarmCluster, client: str, prompt: Any, max_tokens: int) -> list[str]:
    with closing(ask(cluster, client, prompt, max_tokens)) as connection:
        response = connection.getresponse()
        found = json.loads(response.read())
    assert response.status == 200, f"{found}\n{cluster.log()}"
    return [choice["text"] for choice in found["choices"]]


@contextmanager
def hog(cluster: WarmCluster, node: dict[str, Any]) -> Iterator[None]:
    """Has bodies of many prompts in flight, of which some are preempted all the time."""
    with ExitStack() as stack:
        for body in range(BODIES):
            prompts = [[5 + number, 6, body] for number in range(PROMPTS)]
            stack.enter_context(closing(ask(cluster, GREEDY, prompts, TOKENS)))
        cluster.wait_for(lambda: node_metrics(node)[PREEMPTED] > 4)
        yield


@pytest.mark.parametrize("layout", ["apart", pytest.param("both", marks=pytest.mark.slow)])
def test_a_short_answer_does_not_wait_for_the_blocks_of_a_greedy_client(layout: str) -> None:
    """Meanwhile the node generates less than 1.5 answers of the greedy client: those that were
    preempted do not go before it. All answers are those that each client has alone."""
    options = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 16}
    with WarmCluster("llama-gqa", 0, 0, **options) as cluster:
        for role, size in LAYOUTS[layout].items():
            for _ in range(size):
                cluster.start_node(role)
        cluster.wait_nodes()
        node = next(each for each in cluster.nodes() if each["role"] != "prefill")
        short = [[9, 8, 7 + number] for number in range(ANSWERS)]
        alone = [answer(cluster, ANOTHER, prompt, 4) for prompt in short]
        long = answer(cluster, GREEDY, [[5, 6, 7]], TOKENS)
        with hog(cluster, node):
            before = node_metrics(node)[GENERATED]
            assert [answer(cluster, ANOTHER, prompt, 4) for prompt in short] == alone
            assert node_metrics(node)[GENERATED] - before < 1.5 * TOKENS * ANSWERS
            assert answer(cluster, ANOTHER, [[5, 6, 7]], TOKENS) == long
        cluster.wait_idle()
