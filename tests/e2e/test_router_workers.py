"""One router of two processes: both serve behind one port, answer as one, and may die."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import reference
from benchmarks.chaos import NODE_OPTIONS
from callers import fresh_prompt
from pdserve.client.resuming import ResumingClient
from warm import WarmCluster, run_roles

pytestmark = pytest.mark.slow  # a worker imports all of a router: seconds of CPU each

MODEL = "llama-gqa"
KEY = {"cluster_key": "k" * 32}
SUCCESS = "pdserve_request_success_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    router = {"router_workers": 2, "max_client_share": 1, **KEY}
    with WarmCluster(MODEL, decode=0, router=router, **NODE_OPTIONS, **KEY) as made:
        made.start_held("decode")
        made.wait_nodes()
        made.wait_for(lambda: both_ready(made))
        yield made


def workers(cluster: WarmCluster) -> list[dict[str, Any]]:
    """Returns them as `/v1/cluster` lists them; empty while only one answers."""
    found: list[dict[str, Any]] = cluster.get("/v1/cluster").json().get("workers", [])
    return found if len(found) == 2 else []


def both_ready(cluster: WarmCluster) -> bool:
    return [each["ready"] for each in workers(cluster)] == [True, True]


def metrics(cluster: WarmCluster) -> dict[str, float]:
    """The sums over labels, by name."""
    found: dict[str, float] = {}
    for line in cluster.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.replace("{", " ").partition(" ")
            found[name] = found.get(name, 0.0) + float(value.rpartition(" ")[2])
    return found


def test_their_histories_are_one(cluster: WarmCluster) -> None:
    for number in range(6):  # the kernel deals connections to both
        cluster.complete(fresh_prompt(30 + number), max_tokens=4)

    def counted() -> bool:
        samples = cluster.get("/v1/cluster/history").json()["samples"]
        return sum(each["codes"].get("OK", 0) for each in samples) >= 6

    cluster.wait_for(counted)
    assert cluster.state()["routers"] == 1  # of two workers
    texts = [each["text"] for each in cluster.get("/v1/cluster/history").json()["events"]]
    registered = [text for text in texts if text.endswith("registered: ready")]
    assert len(registered) == len(set(registered)) == 2
    assert len([text for text in texts if "has started" in text]) == 2


def test_both_serve_and_answer_as_one(cluster: WarmCluster) -> None:
    prompts = [tuple(fresh_prompt(20 + number)) for number in range(12)]
    before = metrics(cluster)

    def ask(number: int) -> list[int]:
        body = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answer = cluster.complete(list(prompts[number]), **body)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(12) as pool:
        with cluster.standing_still("decode"):
            asked = [pool.submit(ask, number) for number in range(12)]
            cluster.wait_for(lambda: sum(each["running"] for each in workers(cluster)) == 12)
            state = cluster.get("/v1/cluster").json()
            assert state["running"] == cluster.get("/load").json()["server_load"] == 12
            assert all(each["running"] for each in state["workers"]), "the kernel deals them out"
            (decode,) = [node for node in state["nodes"] if node["role"] == "decode"]
            assert decode["in_flight"] == 12 and len(state["nodes"]) == 2
            assert metrics(cluster)["pdserve_num_requests_running"] == 12
        answers = [tuple(each.result()) for each in asked]
    assert answers == [reference.greedy(cluster.model, prompt, 8) for prompt in prompts]
    after = metrics(cluster)
    assert after[SUCCESS] - before.get(SUCCESS, 0.0) == 12
    assert after["pdserve_nodes"] == 2 and after["pdserve_ready"] == 1, "not twice"
    listed = cluster.get("/v1/timelines?limit=12").json()["data"]
    assert len(listed) == 12
    for each in listed:  # whichever worker is asked for whichever's request
        assert cluster.get(f"/v1/timelines/{each['id']}").ok
    cluster.wait_idle()


def test_a_reset_of_the_prefix_cache_reaches_both(cluster: WarmCluster) -> None:
    prompt = list(fresh_prompt(64))

    def cached() -> list[bool]:
        usages = [cluster.complete(prompt, max_tokens=2)["usage"] for _ in range(10)]
        return [bool(each["prompt_tokens_details"]["cached_tokens"]) for each in usages]

    assert cached() == [False] + 9 * [True]
    assert cluster.post("/reset_prefix_cache").ok
    assert cached() == [False] + 9 * [True]


def test_a_worker_is_killed_and_no_stream_is_lost(cluster: WarmCluster) -> None:
    """They go on at its sibling, behind the same address; it returns, and what it had counted is
    not forgotten."""
    client = ResumingClient([cluster.url])
    body = {"prompt": fresh_prompt(20), "max_tokens": 400, "ignore_eos": True, "temperature": 0}

    def whole(stream: Iterator[dict[str, Any]]) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in stream)

    expected = whole(client.stream("/v1/completions", body))
    streams = [client.stream("/v1/completions", body) for _ in range(8)]
    with cluster.standing_still("decode"):
        texts = [whole(islice(stream, 1)) for stream in streams]
        before = metrics(cluster)
        busy = [each for each in workers(cluster) if each["running"]]
        os.kill(busy[0]["pid"], signal.SIGKILL)
        cluster.wait_for(lambda: busy[0]["pid"] not in {each["pid"] for each in workers(cluster)})
        cluster.wait_for(lambda: workers(cluster))
    assert [text + whole(stream) for text, stream in zip(texts, streams, strict=True)] == [
        expected
    ] * 8
    assert client._turn, "streams broke off"
    cluster.wait_for(lambda: both_ready(cluster))
    after = metrics(cluster)
    assert after[SUCCESS] == before[SUCCESS] + sum(each["running"] for each in busy)
    assert all(after[name] >= value for name, value in before.items() if name.endswith("_total"))
    assert after["pdserve_router_worker_deaths_total"] == 1
    cluster.wait_idle()
    assert cluster.crashed() == []


def test_invalid_options_are_refused_before_serving(tmp_path: Path) -> None:
    free = ["--port", "0", "--grpc-port", "0", "--registry-port", "0"]
    common = ["router", "--model", "tests/models/llama-gqa", *free, "--router-workers"]
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        commands = {
            "--router-workers: 0 is less than 1": [*common, "0"],
            f"cannot listen on 127.0.0.1:{port}:": [*common, "2", "--port", port],
            "choose another --grpc-port": [*common, "2", "--grpc-port", port],
            "choose another --registry-port": [*common, "2", "--registry-port", port],
            "--runtime-lora-dir goes with one of --router-workers": [
                *(*common, "2", "--enable-lora", "--runtime-lora-dir", str(tmp_path))
            ],
            "nope": [*common, "2", "--tool-call-parser", "nope"],
        }
        ended = run_roles(tmp_path, list(commands.values()))
    for why, (code, log) in zip(commands, ended, strict=True):
        assert code == 2 and why in log, (code, log)
        assert log.count(" ERROR ") + log.count(": error: ") == 1, log
