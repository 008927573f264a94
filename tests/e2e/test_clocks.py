"""Hosts whose clocks are minutes apart, with a cluster key, whose tokens name the time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import reference
from warm import WarmCluster

MODEL = "llama-gqa"
PROMPT = tuple(range(5, 25))
NUM_TOKENS = 40
OFF = 120  # seconds
KEY = "of-this-test-and-no-other"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WarmCluster, Path]]:
    """And the file that says by how much the router's clock is off. One node's is behind the
    others, one's is ahead."""
    folder = tmp_path_factory.mktemp("clocks")
    clocks = {"router": 0, "prefill": -OFF, "decode": OFF}
    for name, seconds in clocks.items():
        (folder / name).write_text(str(seconds))
    with WarmCluster(MODEL, 0, 0, {"cluster_key": KEY}, cluster_key=KEY) as cluster:
        cluster.kill("router")
        cluster.start_router(("mortal:clock", str(folder / "router")))
        for role in ("prefill", "decode"):
            cluster.start_node(role, ("mortal:clock", str(folder / role)))
        cluster.wait_nodes()
        yield cluster, folder / "router"


def check(cluster: WarmCluster) -> None:
    answer = cluster.complete(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = reference.greedy(cluster.model, PROMPT, NUM_TOKENS)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, tokens)


def reasons(cluster: WarmCluster) -> dict[str, str]:
    return {node["role"]: node["reason"] for node in cluster.nodes()}


def off(behind: int, ahead: int) -> dict[str, str]:
    text = "its clock is {} s {} the router's: set the clocks (NTP)"
    words = {"prefill": (behind, "behind"), "decode": (ahead, "ahead of")}
    return {role: text.format(*said) for role, said in words.items()}


def test_hosts_whose_clocks_are_far_apart_serve_and_it_is_said_once(
    cluster: tuple[WarmCluster, Path],
) -> None:
    service, _ = cluster
    check(service)
    service.wait_for(lambda: reasons(service) == off(OFF, OFF))
    assert all(node["state"] == "ready" for node in service.nodes())
    assert service.log().count("s behind the router's") == 1
    assert service.log().count("s ahead of the router's") == 1
    assert "migrates to other nodes" not in service.log()


def test_a_step_of_the_router_s_clock_stops_nothing(cluster: tuple[WarmCluster, Path]) -> None:
    service, clock = cluster
    stream = service.stream(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
    events = list(islice(stream, 1))
    clock.write_text(str(OFF + 30))
    events += stream
    text = "".join(each["choices"][0]["text"] for each in events if each["choices"])
    tokens = reference.greedy(service.model, PROMPT, NUM_TOKENS)
    assert text == reference.decode(service.model, tokens)
    check(service)
    prefill = f"its clock is {2 * OFF + 30} s behind the router's: set the clocks (NTP)"
    decode = "its clock is 30 s behind the router's: set the clocks (NTP)"
    service.wait_for(lambda: reasons(service) == {"prefill": prefill, "decode": decode})
    assert all(node["state"] == "ready" for node in service.nodes())
    check(service)
    assert "migrates to other nodes" not in service.log()


def test_a_router_that_starts_again_with_another_clock_finds_its_nodes(
    cluster: tuple[WarmCluster, Path],
) -> None:
    service, clock = cluster
    clock.write_text(str(-OFF))
    before = {node["node_id"] for node in service.nodes()}
    service.kill("router")
    service.start_router(("mortal:clock", str(clock)))
    service.wait_nodes()
    assert {node["node_id"] for node in service.nodes()} == before
    check(service)
