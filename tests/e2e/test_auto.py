"""A cluster started with defaults: the nodes choose their connectors themselves."""

from __future__ import annotations

import reference
from warm import WarmCluster

NUM_TOKENS = 24


def test_nodes_choose_their_connectors_and_say_so() -> None:
    with WarmCluster("llama-gqa", device="cpu") as cluster:
        said = "KV connectors: shm, tcp (auto: CPU cache)"
        assert cluster.log().count(said) == 2, cluster.log()
        assert all(node["kv_connectors"] == ["shm", "tcp"] for node in cluster.nodes())
        prompt = tuple(reference.encode(cluster.model, "Once upon a time there was a fox."))
        answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = reference.greedy(cluster.model, prompt, NUM_TOKENS)
        assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)
        cluster.wait_idle()
