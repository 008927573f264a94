"""Nodes of a warm cluster that die or freeze in the middle of a client's request."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle
from typing import Any

import grpc
import psutil
import pytest

import reference
from benchmarks.warm_start import alive
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from thinned import as_slow
from warm import WarmCluster

PROMPT = tuple(range(5, 155))  # three chunks
NUM_TOKENS = 24
MORE_BLOCKS = 400  # more than others have, so that least-load prefers the node that will die
SINK, D = "pdserve.kv_transfer.control.sink:KVSink", "pdserve.decode_node.session:DecodeSession"
RESERVATION = "pdserve.kv_transfer.control.recv_transfer:RecvTransfer"
HANDOFF, P = (
    "pdserve.kv_transfer.control.source:SendTransfer",
    "pdserve.prefill_node.session:PrefillSession",
)
CLIENT = "pdserve.kv_transfer.control.sink_client:SinkClient"

# ---- clients: each sends a request and returns everything it received ----


def greedy(cluster: WarmCluster) -> Any:
    """A stream with log-probabilities."""
    tokens: list[Any] = []
    text = ""
    for event in cluster.stream(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2):
        for choice in event["choices"]:
            logprobs = choice["logprobs"] or {}
            tokens += zip(
                logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True
            )
            text += choice["text"]
    return text, choice["finish_reason"], tokens


def sampled(cluster: WarmCluster) -> Any:
    """A sampled answer with penalties and min_tokens, not streamed."""
    return cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7, min_tokens=20,
        frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1,
    )["choices"]  # fmt: skip


def constrained(cluster: WarmCluster) -> Any:
    """Two sampled choices with bad words and banned ids."""
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
        answers = pb_grpc.InferenceStub(channel).Generate(request, timeout=120)
        tokens = [token.id for answer in answers for token in answer.tokens]
    assert tuple(tokens) == reference.greedy(cluster.model, PROMPT, NUM_TOKENS)
    return tokens


def structured(cluster: WarmCluster) -> Any:
    """Two choices with a grammar, whose matchers must be rebuilt on another node."""
    choices = cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, temperature=1.0, seed=4, n=2,
        structured_outputs={"regex": "([A-Z][a-z]{2,8} (likes|is) [0-9]{1,3}[.;] ){2,}"},
    )["choices"]  # fmt: skip
    for choice in choices:
        assert re.match("[A-Z][a-z]{2,8} (likes|is) [0-9]{1,3}[.;] ", choice["text"]), choice
    return choices


def scored(cluster: WarmCluster) -> Any:
    """Two choices with prompt log-probabilities, which come before the first token."""
    choices = cluster.complete(
        list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, n=2, prompt_logprobs=3
    )["choices"]
    assert all(len(choice["prompt_logprobs"]) == len(PROMPT) for choice in choices)
    return choices


CLIENTS = (greedy, sampled, over_grpc, several, stopped, constrained, structured)


@cache
def undisturbed(cluster: WarmCluster, client: Any) -> Any:
    """Returns the answer when no node fails."""
    return client(cluster)


def check(
    cluster: WarmCluster, client: Any, role: str, number: str, point: str, count: int
) -> None:
    """Checks that the answer is the same when the preferred node dies."""
    expected = undisturbed(cluster, client)
    mortal = cluster.start_node(
        role, ("mortal:arm", number, point, str(count)), num_gpu_blocks_override=MORE_BLOCKS
    )
    cluster.wait_nodes()
    pid = cluster.pids.pop(mortal)  # it may end from now on
    try:
        ask_until(lambda: has_got(pid, number), client, cluster, expected)
        if number == "SIGSTOP":
            os.kill(pid, signal.SIGCONT)  # it wakes up after it was given up, and must do no harm
            cluster.wait_idle()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.wait_idle()


def ask_until(struck: Callable[[], bool], client: Any, cluster: WarmCluster, expected: Any) -> None:
    """Repeats the request until the failing node got one: on a slow machine whose heartbeats come
    late, the router may choose another node."""
    for _ in range(20):
        assert client(cluster) == expected
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if struck():
                return
            time.sleep(0.01)
    raise AssertionError(f"nothing failed\n{cluster.log()}")


def has_got(pid: int, number: str) -> bool:
    if number == "SIGKILL":
        return not alive(pid)
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def at_every_step(steps: Sequence[tuple[str, str, int]], every: int = 1) -> pytest.MarkDecorator:
    """Returns the cases of a test with arguments (role, point, how many times it is passed), client
    and signal. `make test` runs each `every`-th step once: there a node dies or, at the next step,
    freezes."""
    cases = [
        pytest.param(step, client, number, id="-".join(map(str, (*step, client.__name__, number))))
        for step, client in zip(steps, cycle(CLIENTS), strict=False)
        for number in ("SIGKILL", "SIGSTOP")
    ]
    few = [2 * number + number // every % 2 for number in range(0, len(steps), every)]
    cases = [case if number in few else as_slow(case) for number, case in enumerate(cases)]
    return pytest.mark.parametrize(("step", "client", "number"), cases)
