"""KV events of real nodes: over ZeroMQ, as others' tools read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import reference
from benchmarks.fleet import free_port
from callers import fresh_prompt
from cluster import node_metrics
from warm import WarmCluster, run_roles

MODEL = "llama-gqa"
SIZE = 16


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, prefill=0) as made:
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        made.start_node("prefill", kv_events_config=json.dumps(config))
        made.wait_nodes()
        yield made


def test_a_tool_reads_what_a_node_has_cached(cluster: WarmCluster, port: int) -> None:
    prompt = fresh_prompt(3 * SIZE + 5)
    tokens: list[int] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.RCVTIMEO, 60_000)
        sub.setsockopt(zmq.LINGER, 0)
        sub.connect(f"tcp://127.0.0.1:{port}")
        sub.subscribe("")
        while not sub.poll(20):  # until the node knows of the subscription
            cluster.complete(fresh_prompt(SIZE), max_tokens=1)
        answer = cluster.complete(prompt, max_tokens=8)
        assert answer["choices"][0]["text"] == text(cluster, prompt)
        numbers: list[int] = []
        while len(tokens) < 3 * SIZE:
            topic, number, batch = sub.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            stored = [event for event in msgspec.msgpack.decode(batch)[1] if event["block_hashes"]]
            for event in stored:
                if event["token_ids"][:SIZE] == prompt[:SIZE] or tokens:
                    tokens += event["token_ids"]
        assert topic == b"" and numbers == list(range(numbers[0], numbers[-1] + 1))
    assert tokens == prompt[: 3 * SIZE]
    (node,) = cluster.nodes("prefill")
    assert node_metrics(node)['pdserve_kv_events_total{event="BlockStored"}'] >= 1


def text(cluster: WarmCluster, prompt: list[int]) -> str:
    return reference.decode(cluster.model, reference.greedy(cluster.model, tuple(prompt), 8))


def test_a_port_in_use_and_a_misspelt_field_end_the_node(port: int, tmp_path: Path) -> None:
    def command(**config: Any) -> list[str]:
        config = {"enable_kv_cache_events": True, **config}
        return ["prefill_node", "--router=127.0.0.1:9", f"--kv-events-config={json.dumps(config)}"]

    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        at = f"tcp://*:{taken.bind_to_random_port('tcp://*')}"
        ended = run_roles(tmp_path, [command(endpoint=at), command(endpint=at)])
    codes, said = zip(*ended, strict=True)
    assert codes == (2, 2), said
    assert f"--kv-events-config: cannot use {at}: Address already in use" in said[0]
    assert "--kv-events-config: unknown key 'endpint'; did you mean endpoint?" in said[1]
