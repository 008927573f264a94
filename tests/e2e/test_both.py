"""Nodes of both roles as a user runs them: alone, beside pairs, starting, draining and dying."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import chain

import psutil
import pytest
import requests

import reference
from benchmarks.warm_start import alive
from cluster import Cluster, ended, node_metrics, text_of
from processes import command
from warm import WarmCluster

MODEL = "mistral"
PROMPT = tuple(range(5, 155))  # three chunks
NUM_TOKENS = 24
LONG = 150  # tokens, about half a second
SEVERAL = {"n": 3, "temperature": 0.9, "seed": 5, "ignore_eos": True, "max_tokens": NUM_TOKENS}
DRAWN = [  # each differs in what it draws from, or in what it may draw
    SEVERAL,
    {**SEVERAL, "n": 1, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "logprobs": 3},
    {**SEVERAL, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {**SEVERAL, "ignore_eos": False, "min_tokens": 9, "logit_bias": {"7": 4}, "bad_words": ["the"]},
]


def expected(folder: object, num_tokens: int) -> str:
    return reference.decode(folder, reference.greedy(folder, PROMPT, num_tokens))


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with Cluster(MODEL, both=1) as cluster:
        yield cluster


def test_one_process_serves_and_listens_on_its_two_ports_only(up: Cluster) -> None:
    (node,) = up.nodes()
    assert node["role"] == "both" and node["node_id"].startswith("both-")
    state = up.get("/v1/cluster").json()
    assert (state["ready"], state["reason"], state["pairings"]) == (True, "ok", [])
    answer = up.complete(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
    assert answer["choices"][0]["text"] == expected(up.model, NUM_TOKENS)
    (process,) = (
        each
        for each in psutil.Process(up.processes["up"].pid).children()
        if "pdserve.decode_node.both" in command(each)
    )
    listening = {
        each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"
    }
    addresses = (node["address"], node["metrics_address"])
    assert listening == {int(each.rpartition(":")[2]) for each in addresses}


def test_a_timeline_says_that_nothing_was_handed_over(up: Cluster) -> None:
    prompt = [9, *PROMPT]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answers = [
        requests.post(
            f"{up.url}/v1/completions", json=body, headers={"X-Pdserve-Timeline": "1"}, timeout=60
        ).json()
        for _ in range(2)
    ]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached == [0, len(prompt) // 16 * 16]
    line = answers[0]["pdserve"]["timeline"]
    assert line["reserved"] is None and line["transferred"] is None
    assert line["transfer_bytes"] == 0 and line["prefill_seconds"] > 0
    assert line["queued"] <= line["first_token"] <= line["finished"]


def test_choices_share_one_prefill(up: Cluster) -> None:
    (node,) = up.nodes()
    before = node_metrics(node)["pdserve_prompt_tokens_total"]
    up.complete([11, *PROMPT], **SEVERAL)
    computed = node_metrics(node)["pdserve_prompt_tokens_total"] - before
    assert computed < len(PROMPT) + 3 * 16, "the others compute what is after its last full block"


@pytest.mark.slow
def test_it_draws_what_a_pair_draws(up: Cluster) -> None:
    with WarmCluster(MODEL) as pair:
        for options in DRAWN:
            answers = [each.complete(list(PROMPT), **options)["choices"] for each in (up, pair)]
            assert answers[0] == answers[1]
    up.wait_idle()


def test_ctrl_c_drains_and_ends_all(up: Cluster) -> None:
    stream = up.stream(list(PROMPT), max_tokens=LONG, ignore_eos=True)
    begin = [next(stream)]
    up.processes["up"].send_signal(signal.SIGINT)
    assert text_of(chain(begin, stream)) == expected(up.model, LONG)
    assert ended(up.processes.pop("up")) == 0
    assert up.home.processes() == []


def test_one_that_drains_finishes_what_it_has() -> None:
    with WarmCluster(MODEL, 0, 0, drain_timeout=60) as cluster:
        old = cluster.start_held("both")
        cluster.wait_nodes()
        stream = cluster.stream(list(PROMPT), max_tokens=LONG, ignore_eos=True)
        with cluster.standing_still("both", steps=20):
            begin = [next(stream)]
            cluster.start_node("both")
            cluster.wait_nodes()
            pid = cluster.drain(old)
            cluster.wait_for(lambda: len(cluster.nodes()) == 1)
            answer = cluster.complete(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer["choices"][0]["text"] == expected(cluster.model, NUM_TOKENS)
        assert text_of(iter(begin)) + text_of(stream) == expected(cluster.model, LONG)
        cluster.wait_for(lambda: not alive(pid))
        assert cluster.exit_code(pid) == 0
        cluster.wait_idle()


def test_ready_says_what_serves_and_what_is_missing() -> None:
    router = {"queue_timeout": 0.5, "heartbeat_timeout": 30}  # the dead refuse their probes
    with WarmCluster(MODEL, router=router) as cluster:

        def reason() -> str:
            return str(cluster.get("/v1/cluster").json()["reason"])

        both = cluster.start_node("both")
        cluster.wait_nodes()
        assert reason() == "ok"
        cluster.kill("prefill-1")
        cluster.wait_for(lambda: "nodes of both roles serve: no usable prefill" in reason())
        assert cluster.get("/ready").status_code == 200
        answer = cluster.complete(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected(cluster.model, NUM_TOKENS)
        cluster.kill(both)
        cluster.kill("decode-2")
        cluster.wait_for(lambda: cluster.get("/ready").status_code == 503)

        def message() -> str:
            return str(cluster.get("/ready").json()["error"]["message"])

        # Each death is noticed by itself.
        cluster.wait_for(lambda: "no usable prefill node and no usable decode node" in message())
        cluster.wait_for(lambda: "no usable both node" in message())
        response = cluster.post("/v1/completions", prompt="x")
        assert response.status_code == 503 and "both" in response.json()["error"]["message"]
        cluster.start_node("both")
        cluster.wait_nodes()
        cluster.wait_for(lambda: cluster.get("/ready").status_code == 200)
        cluster.complete(list(PROMPT), max_tokens=2)
