"""One client that asks for much, and another one beside it, on the same nodes: 127.0.0.1 and
127.0.0.2 are two clients of a router without keys."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cluster import node_metrics
from warm import WarmCluster

GREEDY, ANOTHER = "127.0.0.1", "127.0.0.2"
REQUESTS = 16  # of the greedy client at once
SEQS = 8
Ask = tuple[list[int], dict[str, Any]]  # a prompt, and what else a body has


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    # So few tokens a step that a prompt takes 24.
    options = {"max_num_seqs": SEQS, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 2048}
    router = {"queue_timeout": 600, "heartbeat_timeout": 30}
    with WarmCluster("llama-gqa", 0, 0, router, **options) as cluster:
        cluster.start_held("prefill")
        cluster.start_held("decode")
        cluster.wait_nodes()
        yield cluster


def ask(cluster: WarmCluster, client: str, prompt: list[int], **body: Any) -> None:
    connection = http.client.HTTPConnection(
        "127.0.0.1", cluster.ports["http"], timeout=600, source_address=(client, 0)
    )
    headers = {"Content-Type": "application/json", "X-Request-Id": client}
    try:
        body = {"prompt": prompt, "ignore_eos": True, **body}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, f"{answer}\n{cluster.log()}"
    assert answer["usage"]["completion_tokens"] == body.get("n", 1) * body["max_tokens"]


def order(cluster: WarmCluster, role: str, greedy: list[Ask], another: list[Ask]) -> list[str]:
    """Returns each request's client, in the order in which the router had its answer. Those of
    the other client come once the greedy one's are on the node, and one of them has its seat there
    before one of these ends."""
    begun = cluster.log().count(" finished: ")
    with ThreadPoolExecutor(len(greedy) + len(another)) as pool:

        def submit(client: str, asks: list[Ask]) -> list[Future[None]]:
            before = in_flight(cluster)
            futures = [pool.submit(ask, cluster, client, prompt, **body) for prompt, body in asks]
            cluster.wait_for(lambda: in_flight(cluster) == before + len(asks))
            return futures

        with cluster.standing_still(role):
            futures = submit(GREEDY, greedy) + submit(ANOTHER, another)
            cluster.wait_for(lambda: has_seat(cluster, role))
        for future in futures:
            future.result()
    return re.findall(r"router +(\S+) \S+ finished: ", cluster.log())[begun:]


def in_flight(cluster: WarmCluster) -> int:
    (node,) = cluster.nodes("decode")
    return int(node["in_flight"])


def has_seat(cluster: WarmCluster, role: str) -> bool:
    """Whether the node could compute a request of the other client."""
    if role == "prefill":
        values = node_metrics(cluster.nodes("prefill")[0])
        return values["pdserve_num_requests_running"] > SEQS
    found = cluster.get(f"/v1/timelines/{ANOTHER}").json()["data"]
    return any(each["timeline"]["transferred"] for each in found)


def test_a_client_of_many_choices_does_not_starve_others_on_a_decode_node(cluster: WarmCluster):
    """Eight sequences are computed in a step; one client has 64 in hand, each of 50 tokens."""
    greedy = [([5 + i, 6, 7], {"n": 4, "max_tokens": 50}) for i in range(REQUESTS)]
    another = [([9, 8, 7 + i], {"max_tokens": 4}) for i in range(3)]
    ends = order(cluster, "decode", greedy, another)
    assert ANOTHER not in ends[REQUESTS // 2 + 3 :], "it waited until the others had ended"


def test_a_client_of_many_prompts_does_not_starve_others_on_a_prefill_node(cluster: WarmCluster):
    """A prompt is computed in 24 steps; one client has eight on the node, and as many behind
    them."""
    greedy = [([5 + i, *[9] * 383], {"max_tokens": 1}) for i in range(REQUESTS)]
    ends = order(cluster, "prefill", greedy, [([200, *[9] * 383], {"max_tokens": 1})])
    assert ends.index(ANOTHER) <= 4, "it waited until the others had ended"
