"""Greedy output equals the reference, token for token, in every topology.

Each family with every layout of up to four ranks on the prefill node, and on the decode node
another one, in turn: every layout serves in both roles, and KV is cut and joined between unequal
ones. One cluster a topology; in it: prompts from one token to several chunks; whole, streamed and
as token ids over gRPC; alone and eight at once; with a cold and a warm prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference
from cluster import node_metrics
from exact import NUM_TOKENS, Asker, check_exact, check_prompt_logprobs, prompts
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from warm import WarmCluster

DENSE = ("llama-gqa", "qwen2", "qwen3", "mistral")
SPARSE = ("mixtral", "qwen2-moe", "qwen3-moe")


@dataclass(frozen=True)
class Layout:
    """The ranks of one node: `tp` in each of `pp` stages, experts spread over `ep` of them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def flags(self, exchange: str) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "expert_parallel_size": self.ep,
            "all2all_backend": exchange,
        }

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}ep{self.ep}"


LAYOUTS = [
    Layout(tp, pp, ep)
    for tp, pp, ep in itertools.product((1, 2, 4), repeat=3)
    if tp * pp <= 4 and ep <= tp
]


def layouts_of(model: str) -> list[Layout]:
    return [each for each in LAYOUTS if model in SPARSE or each.ep == 1]


CONNECTORS = ("shm", "tcp")
EXCHANGES = ("alltoallv", "allgather_reducescatter", "replicated")


def topologies() -> Iterator[tuple[str, Layout, Layout, str, str]]:
    """(model, prefill layout, decode layout, connector, exchange of tokens between experts)."""
    for number, model in enumerate(DENSE + SPARSE):
        layouts = layouts_of(model)
        for index, prefill in enumerate(layouts):
            decode = layouts[(index + 1 + number) % len(layouts)]
            turn = index + number
            yield model, prefill, decode, CONNECTORS[turn % 2], EXCHANGES[turn % 3]


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


def test_the_demo_model_equals_transformers(demo: WarmCluster) -> None:
    """With prompts whose best two logits are nowhere closer than 0.01: this model was not trained
    to choose clearly, and after some of the others rounding decides."""
    cases = [prompts(demo.model)[number] for number in (1, 10, 13)]
    check_exact(demo, cases, range(0, 3, 2), at_once=len(cases), num_tokens=10)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "connector", "exchange"), list(topologies()), ids=str
)
def test_greedy_output_equals_transformers(
    model: str, prefill: Layout, decode: Layout, connector: str, exchange: str
) -> None:
    with WarmCluster(model, 0, 0, kv_connector=connector, kv_lease=10) as cluster:
        cluster.start_node("prefill", **prefill.flags(exchange))
        cluster.start_node("decode", **decode.flags(exchange))
        cluster.wait_nodes()
        # Each layout gets half of the prompts; each family has every prompt alone in some layout.
        layouts = layouts_of(model)
        turn, half = divmod(layouts.index(prefill), 2)
        alone = range(turn, 8, len(layouts) // 2)
        check_exact(cluster, prompts(cluster.model)[half::2], alone, at_once=8)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama-gqa", Layout()), ("qwen3", Layout(2, 2)), ("qwen3-moe", Layout(2, 1, 2))],
    ids=str,
)
def test_a_node_of_both_roles_equals_transformers(model: str, layout: Layout) -> None:
    with WarmCluster(model, 0, 0) as cluster:
        cluster.start_node("both", **layout.flags("alltoallv"))
        cluster.wait_nodes()
        check_exact(cluster, prompts(cluster.model), range(0, 16, 4))
        check_prompt_logprobs(cluster, prompts(cluster.model)[-1], n=2)


@pytest.mark.parametrize("model", ["llama-gqa", "qwen3-moe"])
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
    """What transformers says if neither the first token nor some pairs of what it said before may
    come, nor every seventh token."""
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
