"""Nodes of one host that read each other's blocks in place: the same tokens, whoever dies when, and
every block comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import reference
import segments
from benchmarks.warm_start import alive
from cluster import Cluster, node_metrics
from deaths import CLIENT, PROMPT, RESERVATION, SINK, D, ask_until, at_every_step, check, greedy
from exact import check_exact, prompts
from pdserve.common.core.host import host_identity
from warm import WarmCluster

OPTIONS: dict[str, Any] = {"kv_connector": "shared", "kv_lease": 10, "max_model_len": 512}
LONG = {**OPTIONS, "max_model_len": 1024}


def counted(cluster: WarmCluster, role: str, event: str) -> float:
    """Of all nodes of a role, as their metrics have it."""
    name = f'pdserve_kv_transfer_events_total{{event="{event}"}}'
    return sum(node_metrics(node).get(name, 0.0) for node in cluster.nodes(role))


# ---- exact, in every layout ----

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one rank": ({}, {}, "all"),
    "two ranks": ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}, "all"),
    "two stages": ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2}, "all"),
    "no prefix cache": ({"no_enable_prefix_caching": ""}, {}, "all"),
    "more blocks": ({"num_gpu_blocks_override": 500}, {"num_gpu_blocks_override": 90}, "all"),
    "few blocks": ({"num_gpu_blocks_override": 60}, {}, "some"),  # when they are lent, it copies
    "unequal": ({"tensor_parallel_size": 2}, {}, "none"),  # it copies
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_transformers(layout: str) -> None:
    prefill, decode, lent = LAYOUTS[layout]
    with WarmCluster("llama-gqa", 0, 0, **OPTIONS) as cluster:
        cluster.start_node("prefill", **prefill)
        cluster.start_node("decode", **decode)
        cluster.wait_nodes()
        check_exact(cluster, prompts(cluster.model), range(0, 16, 3), caching=())
        blocks = sum((len(each) - 1) // 16 for each in prompts(cluster.model))
        borrowed = counted(cluster, "decode", "borrowed_blocks")
        assert (borrowed > 0) == (lent != "none")
        if lent == "all":  # but for the last block of each
            assert borrowed >= blocks


# ---- deaths and standstills, at every step of a loan ----

LEDGER = "pdserve.kv_transfer.connectors.shared.ledger:Ledger"
BORROWER = "pdserve.kv_transfer.connectors.shared.borrower:Borrower"
LOANS = "pdserve.kv_transfer.control.loans:Loans"
GUESTS = "pdserve.kv_transfer.control.loans:Guests"

STEPS = [
    ("prefill", f"{LEDGER}.open", 1),
    *[("prefill", f"{LEDGER}.lend", count) for count in (1, 2)],
    ("prefill", f"{LEDGER}.take_back", 1),
    ("prefill", f"{CLIENT}.commit", 1),
    ("prefill", f"{CLIENT}.commit>", 1),
    ("prefill", f"{LEDGER}.on_loan", 1),
    ("prefill", f"{LOANS}.settle", 1),
    *[("decode", f"{BORROWER}.take", count) for count in (1, 2)],
    ("decode", f"{GUESTS}.stay", 1),
    ("decode", f"{RESERVATION}._settle>", 1),
    ("decode", f"{BORROWER}.settle", 1),
    ("decode", f"{RESERVATION}._host", 1),
    ("decode", f"{SINK}.give_back", 1),
    ("decode", f"{BORROWER}.give_back", 1),
    *[("decode", f"{D}.sampled", count) for count in (1, 9, 17)],  # before the stop string,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Whose decode nodes want all of a prompt, whatever they computed before."""
    options = {**LONG, "no_enable_prefix_caching": ""}
    with WarmCluster("llama-gqa", prefill=1, decode=1, **options) as made:
        yield made


@at_every_step(STEPS)
def test_a_node_fails_at_every_step(
    cluster: WarmCluster, step: tuple[str, str, int], client: Any, number: str
) -> None:
    role, point, count = step
    check(cluster, client, role, number, point, count)


def long_answer(cluster: WarmCluster) -> Any:
    return cluster.complete(list(PROMPT), max_tokens=850, ignore_eos=True)["choices"]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_lender_fails_when_its_blocks_come_back(cluster: WarmCluster, number: str) -> None:
    """An answer that is over before the hand-off is returns what it read unheard: it was not
    named as lent yet."""
    check(cluster, long_answer, "prefill", number, f"{LOANS}.returned", 1)


def test_both_nodes_die_with_blocks_lent(cluster: WarmCluster) -> None:
    expected = greedy(cluster)
    more = {"num_gpu_blocks_override": 400}
    died = [
        cluster.start_node("prefill", ("mortal:arm", "SIGKILL", f"{LOANS}.settle", "1"), **more),
        cluster.start_node("decode", ("mortal:arm", "SIGKILL", f"{D}.sampled", "3"), **more),
    ]
    cluster.wait_nodes()
    pids = [cluster.pids.pop(name) for name in died]
    ask_until(lambda: not any(map(alive, pids)), greedy, cluster, expected)
    cluster.wait_idle()


@pytest.fixture(scope="module")
def bereft() -> Iterator[WarmCluster]:
    with WarmCluster("llama-gqa", 1, 1, **LONG) as made:
        yield made


def test_a_decode_node_goes_on_with_the_blocks_of_a_dead_one(bereft: WarmCluster) -> None:
    """What a prefill node has lent stays readable when it is gone."""
    length = 850
    events = bereft.stream(list(PROMPT), max_tokens=length, ignore_eos=True)
    text = next(events)["choices"][0]["text"] + next(events)["choices"][0]["text"]
    decode = psutil.Process(bereft.pids[bereft.names("decode")[0]])
    decode.suspend()  # the answer is not over before the prefill node is gone
    bereft.wait_for(lambda: counted(bereft, "prefill", "lent") > 0)
    os.kill(bereft.pids.pop("prefill-1"), signal.SIGKILL)
    decode.resume()
    text += "".join(choice["text"] for event in events for choice in event["choices"])
    tokens = reference.greedy(bereft.model, PROMPT, length)
    assert text == reference.decode(bereft.model, tokens)


def test_the_successor_of_a_dead_node_lends(cluster: WarmCluster, bereft: WarmCluster) -> None:
    """It is another lender, in the same place."""
    for name in bereft.names("prefill"):
        bereft.kill(name)
    bereft.start_node("prefill")
    bereft.wait_nodes()
    before = counted(bereft, "decode", "borrowed_blocks")
    assert greedy(bereft) == greedy(cluster)
    assert counted(bereft, "decode", "borrowed_blocks") > before
    bereft.wait_idle()


# ---- beside other clusters ----


@pytest.fixture
def two() -> Iterator[tuple[Cluster, WarmCluster]]:
    before = segments.names()
    options = {"kv_connector": "shared", "max_model_len": 512}
    with (
        Cluster("llama-gqa", **options) as up,
        WarmCluster("llama-gqa", 1, 1, **options) as other,
    ):
        yield up, other
    segments.check_none_left(before)


def test_up_serves_with_it_and_leaves_nothing(two: tuple[Cluster, WarmCluster]) -> None:
    """`pdserve up` beside other nodes of the host: they do not meet, and no name is left."""
    assert host_identity()
    for made in two:
        text = reference.decode(made.model, reference.greedy(made.model, PROMPT, 30))
        answer = made.complete(list(PROMPT), max_tokens=30, ignore_eos=True)
        assert answer["choices"][0]["text"] == text
        made.wait_idle()
