"""Two clusters side by side on one host: one short of KV blocks, one without transfers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain

import pytest

import reference
from cluster import Cluster, ask_until_preempted, ended, node_metrics, text_of
from story_grammar import make_corpus

MODEL = "qwen3"
NUM_TOKENS = 120
NUM_PROMPTS = 8

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    """One has 20 blocks, of which a sequence needs 10 in the end; the other computes every
    prompt where it decodes."""
    small = Cluster(MODEL, num_gpu_blocks_override=20, max_model_len=256, drain_timeout=60)
    local = Cluster(MODEL, local_prefill_threshold=1_000_000, max_model_len=256)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        list(pool.map(stack.enter_context, (small, local)))
        yield small, local


def prompts(cluster: Cluster) -> list[Prompt]:
    stories = make_corpus(seed=3, count=NUM_PROMPTS, chat_share=0.0)
    ids = [reference.encode(cluster.model, story) for story in stories]
    return [tuple(each[: 20 + 2 * index]) for index, each in enumerate(ids)]


def complete(cluster: Cluster, prompt: Prompt) -> str:
    answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def test_same_prompts_at_once_give_the_reference(clusters: tuple[Cluster, Cluster]) -> None:
    small, local = clusters
    cases = prompts(small)
    expected = [
        reference.decode(small.model, reference.greedy(small.model, case, NUM_TOKENS))
        for case in cases
    ]

    def check_at_once() -> None:
        with ThreadPoolExecutor(2 * NUM_PROMPTS) as pool:
            answers = [pool.map(complete, [each] * NUM_PROMPTS, cases) for each in clusters]
            assert [list(each) for each in answers] == [expected, expected]

    (decode,) = small.nodes("decode")
    ask_until_preempted(decode, check_at_once)
    for cluster in clusters:
        cluster.wait_idle()
    check_nothing_transferred(local)


def check_nothing_transferred(cluster: Cluster) -> None:
    for node in cluster.nodes():
        metrics = node_metrics(node)
        assert metrics["pdserve_kv_transfer_bytes_total"] == 0
        computed = metrics["pdserve_prompt_tokens_total"]
        assert (computed > 0) is (node["role"] == "decode")


def test_ctrl_c_drains_and_ends_one_and_not_the_other(clusters: tuple[Cluster, Cluster]) -> None:
    small, local = clusters
    prompt = prompts(small)[0]
    stream = small.stream(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
    begin = [next(stream)]
    small.processes["up"].send_signal(signal.SIGINT)
    expected = reference.greedy(small.model, prompt, NUM_TOKENS)
    assert text_of(chain(begin, stream)) == reference.decode(small.model, expected)
    assert ended(small.processes.pop("up")) == 0
    assert small.home.processes() == []
    assert local.get("/ready").status_code == 200


def test_sigkill_of_up_leaves_no_process(clusters: tuple[Cluster, Cluster]) -> None:
    local = clusters[1]
    up = local.processes.pop("up")
    os.kill(up.pid, signal.SIGKILL)
    up.wait()
    local.wait_for(lambda: local.home.processes() == [], 10)
