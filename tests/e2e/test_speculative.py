"""Speculative decoding through whole clusters: what comes out is what comes out without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.warm_start import alive
from cluster import ask_until_preempted, node_metrics
from deaths import MORE_BLOCKS, ask_until, greedy, several
from deaths import D as SESSION
from exact import check_exact, prompts
from paths import MODELS
from thinned import slow, thinned
from warm import WarmCluster, run_roles

MODEL = "llama-gqa"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
DRAFT = {"method": "draft_model", "model": str(MODELS / "mistral"), "num_speculative_tokens": 3}


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
    with WarmCluster(MODEL) as made:
        yield made


@pytest.fixture(scope="module", params=[NGRAM, DRAFT], ids=lambda each: str(each["method"]))
def guesses(request: pytest.FixtureRequest) -> dict[str, str]:
    return option(request.param)


@pytest.fixture(scope="module")
def cluster(guesses: dict[str, str]) -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, 1, 0) as made:
        made.start_node("decode", **guesses)
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


@pytest.mark.parametrize("options", thinned(DRAWN, 4), ids=lambda options: "-".join(options))
def test_sampling_is_the_same_with_speculation(
    cluster: WarmCluster, plain: WarmCluster, options: dict[str, Any]
) -> None:
    for case in prompts(cluster.model)[5::8]:
        body = {"max_tokens": 40, "seed": 11, **options}
        mine, theirs = (each.complete(list(case), **body) for each in (cluster, plain))
        assert rounded(mine["choices"]) == rounded(theirs["choices"])
        counts = [each["usage"]["completion_tokens"] for each in (mine, theirs)]
        assert counts[0] == counts[1]
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("config", "layout"),
    [(DRAFT, {"tensor_parallel_size": 2}), slow(NGRAM, {"pipeline_parallel_size": 2})],
    ids=["draft_model-tp2", "ngram-pp2"],
)
def test_several_ranks_verify_the_same_guesses(
    config: dict[str, Any], layout: dict[str, int]
) -> None:
    with WarmCluster(MODEL, 1, 0) as cluster:
        cluster.start_node("decode", **option(config), **layout)
        cluster.wait_nodes()
        check_exact(cluster, prompts(cluster.model)[2::4], range(0, 4, 3), caching=())
        assert acceptance(cluster)[1] > 0


@pytest.mark.parametrize(("client", "first"), [(greedy, "guessing"), slow(several, "plain")])
def test_a_node_that_guesses_and_one_that_does_not_take_over_from_each_other(
    cluster: WarmCluster, plain: WarmCluster, guesses: dict[str, str], client: Any, first: str
) -> None:
    """The first one is preferred, and dies in mid-stream."""
    expected = client(plain)
    where, config = (plain, guesses) if first == "guessing" else (cluster, {})
    arm = ("mortal:arm", "SIGKILL", f"{SESSION}.sampled", "4")
    mortal = where.start_node("decode", arm, num_gpu_blocks_override=MORE_BLOCKS, **config)
    where.wait_nodes()
    pid = where.pids.pop(mortal)
    ask_until(lambda: not alive(pid), client, where, expected)
    where.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("config", [NGRAM, DRAFT], ids=lambda each: str(each["method"]))
def test_preemption_changes_no_token(plain: WarmCluster, config: dict[str, Any]) -> None:
    """On a node of both roles whose blocks do not suffice for six choices."""
    body = {"n": 6, "seed": 5, "temperature": 0.6, "ignore_eos": True, "max_tokens": 70}
    prompt = list(prompts(plain.model)[8])
    expected = plain.complete(prompt, **body)["choices"]
    with WarmCluster(MODEL, 0, 0, max_model_len=128) as cluster:
        cluster.start_node("both", num_gpu_blocks_override=24, **option(config))
        cluster.wait_nodes()

        def check() -> None:
            assert cluster.complete(prompt, **body)["choices"] == expected

        (node,) = cluster.nodes()
        ask_until_preempted(node, check)
        assert acceptance(cluster)[1] > 0
        cluster.wait_idle()


@pytest.mark.parametrize(
    ("config", "flags", "clue"),
    [
        (
            {**DRAFT, "model": "/nowhere"},
            (),
            "draft model /nowhere: the folder /nowhere does not exist",
        ),
        (DRAFT, ("--pipeline-parallel-size", "2"), "use method ngram"),
        (DRAFT, ("--tensor-parallel-size", "3"), "3"),
        ({**NGRAM, "method": "eagle"}, (), "method must be one of ngram, draft_model"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_invalid_configs_are_refused_at_start(
    tmp_path: Path, config: dict[str, Any], flags: tuple[str, ...], clue: str
) -> None:
    command = ["decode_node", "--model", str(MODELS / MODEL), *flags]
    command += ["--speculative-config", json.dumps(config)]
    ((code, log),) = run_roles(tmp_path, [command])
    assert code == 2 and clue in log, log


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(MODELS / "mistral", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 640}))
    command = ["decode_node", "--model", str(MODELS / MODEL)]
    command += ["--speculative-config", json.dumps({**DRAFT, "model": str(other)})]
    ((code, log),) = run_roles(tmp_path, [command])
    assert code == 2 and "vocabulary of 640 tokens, the model one of 512" in log, log
