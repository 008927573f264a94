"""A node is killed or frozen at every token and at every step of the hand-off: the client gets
every token once, and the ones it would have got."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import grpc
import pytest

import reference
from benchmarks.warm_start import alive
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from warm import WarmCluster

PROMPT = tuple(range(5, 155))  # three chunks
NUM_TOKENS = 24
MORE_BLOCKS = 400  # than the others': least-load placement prefers the node that is to die
SINK, D = "pdserve.kv_transfer.control.sink:KVSink", "pdserve.decode_node.session:DecodeSession"
RESERVATION = "pdserve.kv_transfer.control.reservation:Reservation"
HANDOFF, P = (
    "pdserve.kv_transfer.control.source:Handoff",
    "pdserve.prefill_node.session:PrefillSession",
)
CLIENT = "pdserve.kv_transfer.control.sink_client:SinkClient"

STEPS = [
    *[("decode", f"{D}.{method}", 1) for method in ("events", "admitted", "_reserve", "_landed")],
    ("decode", f"{RESERVATION}._accept", 1),
    ("decode", f"{RESERVATION}._issue", 1),
    *[("decode", f"{SINK}.on_event", count) for count in (1, 2, 3)],
    ("decode", f"{SINK}.commit", 1),
    ("decode", f"{RESERVATION}._verify", 1),
    ("decode", f"{RESERVATION}._activate", 1),
    ("decode", f"{D}._activate>", 1),
    *[
        ("prefill", f"{P}.{method}", 1)
        for method in ("events", "admitted", "sampled", "_take>", "_describe")
    ],
    *[("prefill", f"{P}.computed", count) for count in (1, 2, 3)],
    ("prefill", f"{HANDOFF}._send_commit", 1),
    ("prefill", f"{CLIENT}.commit", 1),
    ("prefill", f"{CLIENT}.commit>", 1),
    ("prefill", f"{HANDOFF}._quiesce", 1),
    ("prefill", f"{HANDOFF}._free", 1),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster("llama-gqa", prefill=1, decode=1) as made:
        yield made


@pytest.fixture(scope="module")
def both() -> Iterator[WarmCluster]:
    """One node of both roles."""
    with WarmCluster("llama-gqa", 0, 0) as made:
        made.start_node("both")
        made.wait_nodes()
        yield made


# ---- the clients: what they ask, and all they were told ----


def greedy(cluster: WarmCluster) -> Any:
    """Streamed, with log-probabilities."""
    tokens: list[Any] = []
    text = ""
    for event in cluster.stream(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2):
        for choice in event["choices"]:
            logprobs = choice["logprobs"] or {}
            tokens += zip(
                logprobs.get("tokens", ()),
                (round(value, 2) for value in logprobs.get("token_logprobs", ())),
                strict=True,
            )
            text += choice["text"]
    return text, choice["finish_reason"], tokens


def sampled(cluster: WarmCluster) -> Any:
    """Whole, drawn with penalties; min_tokens bans the end."""
    return cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7, min_tokens=20,
        frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1,
    )["choices"]  # fmt: skip


def constrained(cluster: WarmCluster) -> Any:
    """Two choices, drawn without some words and ids."""
    return cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, temperature=1.0, seed=9, n=2, ignore_eos=True,
        bad_words=["the", "and", "mill", "dog", "was", "a"], allowed_token_ids=list(range(9, 500)),
    )["choices"]  # fmt: skip


def several(cluster: WarmCluster) -> Any:
    """Three choices at once."""
    return cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, temperature=0.8, seed=3, n=3, ignore_eos=True
    )["choices"]


def stopped(cluster: WarmCluster) -> Any:
    """Ends at a stop string that spans tokens, late in the text."""
    text = reference.decode(cluster.model, reference.greedy(cluster.model, PROMPT, NUM_TOKENS))
    choice = cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, stop=[text[-9:-4]]
    )["choices"][0]
    assert choice["text"] == text[: text.index(text[-9:-4])]
    return choice


def over_grpc(cluster: WarmCluster) -> Any:
    """A stream of token ids."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
    with grpc.insecure_channel(cluster.grpc) as channel:
        answers = pb_grpc.InferenceStub(channel).Generate(request, timeout=60)
        tokens = [token.id for answer in answers for token in answer.tokens]
    assert tuple(tokens) == reference.greedy(cluster.model, PROMPT, NUM_TOKENS)
    return tokens


CLIENTS = (greedy, sampled, over_grpc, several, stopped, constrained)


def check(
    cluster: WarmCluster, client: Any, role: str, number: str, point: str, count: int
) -> None:
    """The answer of a cluster whose preferred node dies is that of one where none does."""
    expected = client(cluster)
    mortal = cluster.start_node(
        role, ("mortal:arm", number, point, str(count)), num_gpu_blocks_override=MORE_BLOCKS
    )
    cluster.wait_nodes()
    pid = cluster.pids[mortal]
    assert client(cluster) == expected
    if number == "SIGKILL":
        cluster.wait_for(lambda: not alive(pid))
    else:
        cluster.wait_for(lambda: "T (stopped)" in open(f"/proc/{pid}/status").read())  # noqa: SIM115
        cluster.send(mortal, signal.SIGCONT)  # a zombie now: it must do no harm
        cluster.wait_idle()
        os.kill(pid, signal.SIGKILL)
    del cluster.pids[mortal]
    cluster.wait_idle()


BOTH_STEPS = [
    *[(f"{D}.{method}", 1) for method in ("events", "admitted", "_prefill")],
    *[(f"{D}.computed", count) for count in (1, 2, 4)],
    *[(f"{D}.sampled", count) for count in (1, 2, 9, NUM_TOKENS - 1)],
]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("point", "client"),
    list(zip(BOTH_STEPS, cycle(CLIENTS), strict=False)),
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value)),
)
def test_a_pair_takes_over_from_a_node_of_both_roles(
    cluster: WarmCluster, point: tuple[str, int], client: Any, number: str
) -> None:
    check(cluster, client, "both", number, *point)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_node_of_both_roles_takes_over_from_another(both: WarmCluster, client: Any) -> None:
    for point in BOTH_STEPS[::3]:
        check(both, client, "both", "SIGKILL", *point)


@pytest.mark.parametrize(("role", "point", "count"), STEPS[:: len(STEPS) // 9], ids=str)
def test_a_node_of_both_roles_takes_over_from_a_pair(
    both: WarmCluster, role: str, point: str, count: int
) -> None:
    """The other one of the pair lives, and is of no use by itself."""
    client = CLIENTS[len(point) % len(CLIENTS)]
    expected = client(both)
    other = "decode" if role == "prefill" else "prefill"
    other = both.start_node(other, num_gpu_blocks_override=MORE_BLOCKS)
    arm = ("mortal:arm", "SIGKILL", point, str(count))
    mortal = both.start_node(role, arm, num_gpu_blocks_override=MORE_BLOCKS)
    both.wait_nodes()
    pid = both.pids.pop(mortal)
    assert client(both) == expected
    both.wait_for(lambda: not alive(pid))
    both.wait_idle()
    both.kill(other)


@pytest.mark.parametrize("token", range(1, NUM_TOKENS))
def test_a_decode_node_dies_at_every_token(cluster: WarmCluster, token: int) -> None:
    client = CLIENTS[token % len(CLIENTS)]
    check(cluster, client, "decode", "SIGKILL", f"{D}.sampled", token)


@pytest.mark.parametrize(
    ("step", "client"),
    list(zip(STEPS, cycle(CLIENTS), strict=False)),
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value)),
)
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_node_fails_at_every_step(
    cluster: WarmCluster, step: tuple[str, str, int], client: Any, number: str
) -> None:
    role, point, count = step
    check(cluster, client, role, number, point, count)
