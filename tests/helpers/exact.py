"""Checks that a cluster gives transformers' output, over every API."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import reference
from cluster import Service, node_metrics, text_of
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from story_grammar import make_corpus

NUM_TOKENS = 17  # so that every answer fills a block of 16 on the decode node


def prompts(folder: Path) -> list[tuple[int, ...]]:
    """Sixteen prompts: 1, 2, 15, 16, 17 … tokens, up to several chunks of 64."""
    text = " ".join(make_corpus(seed=7, count=12, chat_share=0.0))
    ids = reference.encode(folder, text)
    lengths = (1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 150, 220, 300)
    starts = range(0, 7 * len(lengths), 7)
    return [
        tuple(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)
    ]


def check_prompt_logprobs(cluster: Service, prompt: tuple[int, ...], n: int = 1) -> None:
    """Checks each token's log-probability and rank, and the three most likely tokens, against
    transformers; and that the continuation is unchanged."""
    expected = reference.prompt_logprobs(cluster.model, prompt)
    answer = cluster.complete(list(prompt), max_tokens=8, ignore_eos=True, prompt_logprobs=3, n=n)
    said = reference.decode(cluster.model, reference.greedy(cluster.model, prompt, 8))
    assert len(answer["choices"]) == n
    for choice in answer["choices"]:
        first, *told = choice["prompt_logprobs"]
        assert choice["text"] == said and first is None and len(told) == len(expected)
        for row, token, entries in zip(expected, prompt[1:], told, strict=True):
            found = {int(other): entry["logprob"] for other, entry in entries.items()}
            assert found == pytest.approx({other: row[other].item() for other in found}, abs=1e-3)
            best = sorted(found.values())[-3:]
            assert best == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-3)
            own, rank = row[token].item(), entries[str(token)]["rank"]
            least, most = ((row >= own + d).sum().item() for d in (1e-3, -1e-3))
            assert least < rank <= most


class Asker:
    """Sends requests to one cluster, rotating over its APIs."""

    def __init__(self, cluster: Service, num_tokens: int = NUM_TOKENS) -> None:
        self._cluster = cluster
        self._num_tokens = num_tokens
        self._channel = grpc.insecure_channel(cluster.grpc)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def whole(self, prompt: tuple[int, ...]) -> str:
        answer = self._cluster.complete(list(prompt), max_tokens=self._num_tokens, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == self._num_tokens
        return str(answer["choices"][0]["text"])

    def streamed(self, prompt: tuple[int, ...]) -> str:
        return text_of(
            self._cluster.stream(list(prompt), max_tokens=self._num_tokens, ignore_eos=True)
        )

    def token_ids(self, prompt: tuple[int, ...]) -> str:
        """Compares token ids; returns their text."""
        ids = self.ids(prompt)
        assert tuple(ids) == reference.greedy(self._cluster.model, prompt, self._num_tokens)
        return reference.decode(self._cluster.model, ids)

    def ids(self, prompt: tuple[int, ...]) -> list[int]:
        sampling = pb.SamplingParams(max_tokens=self._num_tokens, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        return [token.id for reply in self._stub.Generate(request) for token in reply.tokens]

    def ask(self, number: int, prompt: tuple[int, ...]) -> str:
        return (self.whole, self.streamed, self.token_ids)[number % 3](prompt)

    def close(self) -> None:
        self._channel.close()


def check_exact(
    cluster: Service,
    cases: list[tuple[int, ...]],
    alone: range,
    caching: Collection[str] = ("prefill", "decode"),
    at_once: int = 16,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """`caching`: the roles whose nodes have prefix caches."""
    folder, asker = cluster.model, Asker(cluster, num_tokens)
    expected = [
        reference.decode(folder, reference.greedy(folder, case, num_tokens)) for case in cases
    ]
    # Many concurrent requests with cold prefix caches.
    numbers = [number % len(cases) for number in range(at_once)]
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda number: asker.ask(number, cases[number]), numbers)
        assert list(answers) == [expected[number] for number in numbers], cluster.log()[-3000:]
    # Some single requests with warm caches, over another API than before.
    for number in alone:
        answer = asker.ask(number + 1, cases[number])
        assert answer == expected[number], f"{len(cases[number])} tokens\n{cluster.log()[-3000:]}"
    asker.close()
    for node in (each for role in caching for each in cluster.nodes(role)):
        assert node_metrics(node)["pdserve_prefix_cache_hits_total"] > 0
    cluster.wait_idle()
