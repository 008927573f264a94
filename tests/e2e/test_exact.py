"""Greedy output equals the reference, token for token, in every topology (`topologies.py`).

One cluster a topology; in it: prompts from one token to several chunks; whole, streamed and as
token ids over gRPC; alone and eight at once; with a cold and a warm prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference
from cluster import node_metrics
from exact import NUM_TOKENS, Asker, check_exact, check_prompt_logprobs, prompts
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from topologies import Layout, Topology, candidates, few, in_turn
from warm import WarmCluster


@pytest.fixture
def demo() -> Iterator[WarmCluster]:
    embedded = pytest.importorskip("pdserve.demo_model.embedded")
    try:
        folder = embedded.ensure_embedded_model()
    except embedded.ConfigError as error:
        pytest.skip(str(error))
    reference.load(folder)
    with WarmCluster(folder, max_model_len=1024) as cluster:
        yield cluster


@pytest.mark.slow  # the tiny models are of its family, and its conversion has tests of its own
def test_the_demo_model_equals_transformers(demo: WarmCluster) -> None:
    """With prompts whose best two logits are nowhere closer than 0.01: this model was not trained
    to choose clearly, and after some of the others rounding decides."""
    cases = [prompts(demo.model)[number] for number in (1, 10, 13)]
    check_exact(demo, cases, range(0, 3, 2), at_once=len(cases), num_tokens=10)


def runs() -> Iterator[Any]:
    for number, topology in enumerate(few()):
        yield pytest.param(topology, number, id=str(topology))
    for number, topology in enumerate(in_turn()):
        yield pytest.param(topology, number, id=f"{topology}-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("topology", "number"), list(runs()))
def test_greedy_output_equals_transformers(topology: Topology, number: int) -> None:
    """`number`: each topology gets half of the prompts, and some of these alone."""
    options = {"kv_connector": topology.connector, "block_size": topology.block_size}
    with WarmCluster(topology.model, 0, 0, kv_lease=10) as cluster:
        cluster.start_node("prefill", **topology.prefill.flags(topology.exchange), **options)
        cluster.start_node("decode", **topology.decode.flags(topology.exchange), **options)
        cluster.wait_nodes()
        turn, half = divmod(number, 2)
        check_exact(cluster, prompts(cluster.model)[half::2], range(turn % 4, 8, 4), at_once=8)


def test_every_pair_of_factors_is_met() -> None:
    met = {pair for topology in few() for pair in topology.pairs()}
    assert met >= {pair for topology in candidates() for pair in topology.pairs()}
    assert len(met) > 100 and len(few()) < 10


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("llama-gqa", Layout(), marks=pytest.mark.slow),  # in every test of `both`
        pytest.param("qwen3", Layout(2, 2), marks=pytest.mark.slow),
        ("qwen3-moe", Layout(2, 1, 2)),
    ],
    ids=str,
)
def test_a_node_of_both_roles_equals_transformers(model: str, layout: Layout) -> None:
    with WarmCluster(model, 0, 0) as cluster:
        cluster.start_node("both", **layout.flags("alltoallv"))
        cluster.wait_nodes()
        check_exact(cluster, prompts(cluster.model), range(0, 16, 4))
        check_prompt_logprobs(cluster, prompts(cluster.model)[-1], n=2)


@pytest.mark.parametrize("model", [pytest.param("llama-gqa", marks=pytest.mark.slow), "qwen3-moe"])
def test_bad_words_and_allowed_token_ids_are_exact_over_stages(model: str) -> None:
    """The first token is drawn by the last stage of one node, the others by that of the other."""
    with WarmCluster(model, 0, 0) as cluster:
        cluster.start_node("prefill", pipeline_parallel_size=2, tensor_parallel_size=2)
        cluster.start_node("decode", pipeline_parallel_size=2)
        cluster.wait_nodes()
        with grpc.insecure_channel(cluster.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for prompt in prompts(cluster.model)[::5]:
                check_constrained(stub, cluster.model, prompt)
        for prompt in (prompts(cluster.model)[-1], prompts(cluster.model)[0]):
            check_prompt_logprobs(cluster, prompt)


def check_constrained(
    stub: inference_pb2_grpc.InferenceStub, model: Path, prompt: tuple[int, ...]
) -> None:
    """Compares the tokens with those of transformers if neither the first token nor some pairs of
    what it said before may come, nor every seventh token."""
    first, *rest = reference.greedy(model, prompt, NUM_TOKENS)
    # transformers looks at the end of the prompt, too.
    pairs = [pair for pair in itertools.pairwise(rest) if pair[0] != prompt[-1]]
    words = ((first,), *pairs[::3])
    allowed = tuple(token for token in range(512) if token % 7)
    sampling = pb.SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        allowed_token_ids=allowed,
        bad_words_token_ids=[pb.TokenIds(ids=word) for word in words],
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    ids = [token.id for reply in stub.Generate(request) for token in reply.tokens]
    assert tuple(ids) == reference.greedy(model, prompt, NUM_TOKENS, allowed, words)
    assert not set(itertools.pairwise(ids)) & set(words)


def test_prompts_that_a_decode_node_computes_itself() -> None:
    with WarmCluster("qwen3", router={"local_prefill_threshold": 1_000_000}) as cluster:
        check_exact(cluster, prompts(cluster.model), range(0, 16, 4), caching=("decode",))
        for node in cluster.nodes():
            metrics = node_metrics(node)
            assert metrics["pdserve_kv_transfer_bytes_total"] == 0
            assert (metrics["pdserve_prompt_tokens_total"] > 0) is (node["role"] == "decode")


def test_without_a_prefix_cache_the_tokens_are_the_same() -> None:
    with WarmCluster("llama-gqa", no_enable_prefix_caching="") as cluster:
        folder = cluster.model
        for case in prompts(folder)[-3:] * 2:
            expected = reference.greedy(folder, case, NUM_TOKENS)
            assert Asker(cluster).whole(case) == reference.decode(folder, expected)
        assert all(
            node_metrics(node)["pdserve_prefix_cache_hits_total"] == 0 for node in cluster.nodes()
        )
        cluster.wait_idle()
