"""One client that asks for much, and another one beside it, on the same nodes: 127.0.0.1 and
127.0.0.2 are two clients of a router without keys."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from warm import WarmCluster

GREEDY, ANOTHER = "127.0.0.1", "127.0.0.2"
REQUESTS = 16  # of the greedy client at once
SEQS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    # So few tokens a step that a prompt of the window takes 48.
    options = {"max_num_seqs": SEQS, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 2048}
    router = {"queue_timeout": 120, "heartbeat_timeout": 30}
    with WarmCluster("llama-gqa", 1, 1, router, **options) as cluster:
        yield cluster


def ask(cluster: WarmCluster, client: str, prompt: list[int], **body: Any) -> dict[str, Any]:
    connection = http.client.HTTPConnection(
        "127.0.0.1", cluster.ports["http"], timeout=120, source_address=(client, 0)
    )
    body = {"prompt": prompt, "ignore_eos": True, **body}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, f"{answer}\n{cluster.log()}"
    return answer


def load(cluster: WarmCluster, role: str, what: str) -> int:
    (node,) = cluster.nodes(role)
    return int(node[what])


def test_a_client_of_many_choices_does_not_starve_others_on_a_decode_node(cluster: WarmCluster):
    """Eight sequences are computed in a step; one client has 64 in hand, each of 100 tokens."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        greedy = [
            pool.submit(ask, cluster, GREEDY, [5 + i, 6, 7], n=4, max_tokens=100)
            for i in range(REQUESTS)
        ]
        cluster.wait_for(lambda: load(cluster, "decode", "waiting") > SEQS)
        answers = [ask(cluster, ANOTHER, [9, 8, 7 + i], max_tokens=4) for i in range(3)]
        still = [each for each in greedy if not each.done()]
        assert [each["usage"]["completion_tokens"] for each in answers] == [4, 4, 4]
        assert len(still) >= REQUESTS // 2, "it waited until the others had ended"
        assert all(each.result()["usage"]["completion_tokens"] == 400 for each in greedy)


def test_a_client_of_many_prompts_does_not_starve_others_on_a_prefill_node(cluster: WarmCluster):
    """A prompt is computed in 48 steps; one client has eight on the node, and as many behind
    them."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        greedy: list[Future[Any]] = [
            pool.submit(ask, cluster, GREEDY, [5 + i, *[9] * 767], max_tokens=1)
            for i in range(REQUESTS)
        ]
        cluster.wait_for(lambda: load(cluster, "prefill", "running") == SEQS)
        before = sum(each.done() for each in greedy)
        ask(cluster, ANOTHER, [200, *[9] * 767], max_tokens=1)
        meanwhile = sum(each.done() for each in greedy) - before
        wait(greedy)
        assert before < SEQS and meanwhile <= 4, "it waited until the others had ended"
