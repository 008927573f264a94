"""Speculative decoding through whole clusters: what comes out is what comes out without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest
from test_failover import CLIENTS, MORE_BLOCKS
from test_failover import D as SESSION

import reference
from benchmarks.warm_start import alive
from cluster import node_metrics
from exact import Asker, check_exact, prompts
from warm import WarmCluster, shared

MODEL = "llama-gqa"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def option(config: dict[str, Any]) -> dict[str, str]:
    return {"speculative_config": json.dumps(config)}


def acceptance(cluster: WarmCluster) -> tuple[float, float]:
    """Tokens guessed and tokens guessed right, of all nodes that decode."""
    nodes = [each for each in cluster.nodes() if each["role"] != "prefill"]
    values = [node_metrics(node) for node in nodes]
    for each in values:
        by_place = [each[name] for name in each if "accepted_tokens_per_pos" in name]
        assert sum(by_place) == each["pdserve_spec_decode_num_accepted_tokens_total"]
    drafted, accepted = (
        sum(each[f"pdserve_spec_decode_num_{name}_tokens_total"] for each in values)
        for name in ("draft", "accepted")
    )
    return drafted, accepted


@pytest.fixture(scope="module")
def plain() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, warm=shared()) as made:
        yield made


@pytest.fixture(scope="module", params=[NGRAM], ids=lambda config: str(config["method"]))
def cluster(request: pytest.FixtureRequest) -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, 1, 0, warm=shared()) as made:
        made.start_node("decode", **option(request.param))
        made.wait_nodes()
        yield made


def test_greedy_output_is_the_reference_s_in_fewer_steps(cluster: WarmCluster) -> None:
    check_exact(cluster, prompts(cluster.model), range(0, 16, 4))
    drafted, accepted = acceptance(cluster)
    assert 0 < accepted < drafted


DRAWN: list[dict[str, Any]] = [
    {"n": 3, "temperature": 0.8, "logprobs": 3},
    {"n": 2, "temperature": 0, "stop": ["Lily", "."], "logprobs": 1},
    {"temperature": 0.4, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "min_tokens": 30},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.5, "logit_bias": {"7": 4}, "bad_words": ["the"], "n": 2},
    {"temperature": 0.5, "allowed_token_ids": list(range(9, 500)), "ignore_eos": True},
    {"temperature": 0, "stop_token_ids": [13, 46, 300], "ignore_eos": True},
]


def rounded(value: Any) -> Any:
    """Log-probabilities differ by rounding: rows of another batch."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 2) + 0.0 if isinstance(value, float) else value


@pytest.mark.parametrize("options", DRAWN, ids=lambda options: "-".join(options))
def test_what_is_drawn_is_what_is_drawn_without_it(
    cluster: WarmCluster, plain: WarmCluster, options: dict[str, Any]
) -> None:
    for case in prompts(cluster.model)[3::4]:
        body = {"max_tokens": 40, "seed": 11, **options}
        mine, theirs = (each.complete(list(case), **body) for each in (cluster, plain))
        assert rounded(mine["choices"]) == rounded(theirs["choices"])
        counts = [each["usage"]["completion_tokens"] for each in (mine, theirs)]
        assert counts[0] == counts[1]
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("model", "role", "config", "layout"),
    [
        ("qwen3", "decode", NGRAM, {"tensor_parallel_size": 2}),
        ("mistral", "decode", NGRAM, {"pipeline_parallel_size": 2}),
        ("qwen3-moe", "both", NGRAM, {"data_parallel_size": 2}),
    ],
    ids=str,
)
def test_every_layout_gives_the_reference(
    model: str, role: str, config: dict[str, Any], layout: dict[str, int]
) -> None:
    with WarmCluster(model, int(role == "decode"), 0, warm=shared()) as cluster:
        cluster.start_node(role, **option(config), **layout)
        cluster.wait_nodes()
        check_exact(cluster, prompts(cluster.model)[2::4], range(0, 4, 3), caching=())
        assert acceptance(cluster)[1] > 0


@pytest.mark.parametrize("client", CLIENTS[:5], ids=lambda client: str(client.__name__))
def test_a_node_that_guesses_and_one_that_does_not_take_over_from_each_other(
    cluster: WarmCluster, plain: WarmCluster, client: Any
) -> None:
    """The one that is to die is preferred, and dies in mid-stream."""
    expected = client(plain)
    for where, count in zip((cluster, plain), cycle((3, 6)), strict=False):
        guesses = option(NGRAM) if where is plain else {}
        arm = ("mortal:arm", "SIGKILL", f"{SESSION}.sampled", str(count))
        mortal = where.start_node("decode", arm, num_gpu_blocks_override=MORE_BLOCKS, **guesses)
        where.wait_nodes()
        pid = where.pids.pop(mortal)
        assert client(where) == expected
        where.wait_for(lambda pid=pid: not alive(pid))
        where.wait_idle()


@pytest.mark.parametrize("config", [NGRAM], ids=lambda config: str(config["method"]))
def test_preemption_changes_no_token(config: dict[str, Any]) -> None:
    with WarmCluster(MODEL, 0, 0, warm=shared(), max_model_len=128) as cluster:
        cluster.start_node("both", num_gpu_blocks_override=24, **option(config))
        cluster.wait_nodes()
        asker, cases = Asker(cluster), prompts(cluster.model)[6:12]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(asker.whole, cases))
        asker.close()
        expected = [reference.greedy(cluster.model, case, 36) for case in cases]
        assert answers == [reference.decode(cluster.model, each) for each in expected]
        (node,) = cluster.nodes()
        assert node_metrics(node)["pdserve_num_preemptions_total"] > 0
        assert acceptance(cluster)[1] > 0
        cluster.wait_idle()
