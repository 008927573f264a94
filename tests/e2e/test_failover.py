"""A node is killed or frozen at every token and at every step of the hand-off: the client gets
every token once, and the ones it would have got."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from benchmarks.warm_start import alive
from cluster import ask_until_preempted
from deaths import (
    CLIENT,
    CLIENTS,
    HANDOFF,
    MORE_BLOCKS,
    NUM_TOKENS,
    RESERVATION,
    SINK,
    D,
    P,
    ask_until,
    at_every_step,
    check,
    scored,
    undisturbed,
)
from exact import check_prompt_logprobs
from thinned import only, slow, thinned
from warm import WarmCluster

STEPS = [
    *[("decode", f"{D}.{method}", 1) for method in ("run", "admitted", "_reserve", "_landed")],
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
    with WarmCluster("llama-gqa", prefill=1, decode=1, hasty=True) as made:
        yield made


@pytest.fixture(scope="module")
def both() -> Iterator[WarmCluster]:
    """One node of both roles."""
    with WarmCluster("llama-gqa", 0, 0, hasty=True) as made:
        made.start_node("both")
        made.wait_nodes()
        yield made


BOTH_STEPS = [
    *[(f"{D}.{method}", 1) for method in ("run", "admitted", "_prefilled")],
    *[(f"{D}.computed", count) for count in (1, 2, 4)],
    *[(f"{D}.sampled", count) for count in (1, 2, 9, NUM_TOKENS - 1)],
]


@at_every_step([("both", *step) for step in BOTH_STEPS], every=2)
def test_a_pair_takes_over_from_a_node_of_both_roles(
    cluster: WarmCluster, step: tuple[str, str, int], client: Any, number: str
) -> None:
    role, point, count = step
    check(cluster, client, role, number, point, count)


@pytest.mark.parametrize("client", thinned(CLIENTS, 7))
def test_a_node_of_both_roles_takes_over_from_another(both: WarmCluster, client: Any) -> None:
    for point in BOTH_STEPS[::3]:
        check(both, client, "both", "SIGKILL", *point)


@pytest.mark.parametrize(("role", "point", "count"), thinned(STEPS[:: len(STEPS) // 9], 6))
def test_a_node_of_both_roles_takes_over_from_a_pair(
    both: WarmCluster, role: str, point: str, count: int
) -> None:
    """The other one of the pair lives, and is of no use by itself."""
    client = CLIENTS[len(point) % len(CLIENTS)]
    expected = undisturbed(both, client)
    other = "decode" if role == "prefill" else "prefill"
    other = both.start_node(other, num_gpu_blocks_override=MORE_BLOCKS)
    arm = ("mortal:arm", "SIGKILL", point, str(count))
    mortal = both.start_node(role, arm, num_gpu_blocks_override=MORE_BLOCKS)
    both.wait_nodes()
    pid = both.pids.pop(mortal)
    ask_until(lambda: not alive(pid), client, both, expected)
    both.wait_idle()
    both.kill(other)


@pytest.mark.parametrize("token", only(range(1, NUM_TOKENS), (1, 9, 23)))
def test_a_decode_node_dies_at_every_token(cluster: WarmCluster, token: int) -> None:
    client = CLIENTS[token % len(CLIENTS)]
    check(cluster, client, "decode", "SIGKILL", f"{D}.sampled", token)


@at_every_step(STEPS, every=2)
def test_a_node_fails_at_every_step(
    cluster: WarmCluster, step: tuple[str, str, int], client: Any, number: str
) -> None:
    role, point, count = step
    check(cluster, client, role, number, point, count)


@pytest.mark.parametrize(
    ("role", "point", "count"),
    [
        *[slow("prefill", f"{P}.computed", count) for count in (1, 2)],  # among the prompt's chunks
        ("prefill", f"{P}._describe", 1),
        slow("decode", f"{D}._landed", 1),
        ("both", f"{D}.computed", 2),
    ],
)
def test_prompt_logprobs_outlive_a_node(
    cluster: WarmCluster, role: str, point: str, count: int
) -> None:
    check(cluster, scored, role, "SIGKILL", point, count)


@pytest.mark.slow
def test_prompt_logprobs_outlive_preemption(both: WarmCluster) -> None:
    """Long answers take the blocks of those that came after them."""
    prompts = [tuple(range(5 + i, 305 + i)) for i in range(6)]
    for prompt in prompts:  # alone; what transformers says is known then
        check_prompt_logprobs(both, prompt)

    def check_at_once() -> None:
        with ThreadPoolExecutor(7) as pool:
            long = pool.submit(both.complete, [5] * 20, max_tokens=400, n=8, ignore_eos=True)
            list(pool.map(partial(check_prompt_logprobs, both), prompts * 2))
            long.result()

    (node,) = (node for node in both.state()["nodes"] if node["name"] in both.pids)
    ask_until_preempted(node, check_at_once)
