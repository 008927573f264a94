"""Nodes whose ranks are actors of a Ray cluster with two raylets; stages are on different ones."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from test_exact import prompts

import reference
from cluster import MODELS
from raylets import Raylets
from warm import WarmCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # seconds: Ray's start may take minutes
NUM_TOKENS = 12
MODEL = "llama-gqa"


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets() as cluster:
        yield cluster


def on_ray(raylets: Raylets, **options: Any) -> dict[str, Any]:
    backend = {"distributed_executor_backend": "ray", "ray_address": raylets.address}
    return {**backend, "pipeline_parallel_size": 2, **options}


def check(cluster: WarmCluster) -> None:
    for case in prompts(cluster.model)[::2]:
        answer = cluster.complete(list(case), max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = reference.greedy(cluster.model, case, NUM_TOKENS)
        assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


@pytest.fixture(scope="module")
def split(raylets: Raylets) -> Iterator[WarmCluster]:
    """A stage of the decode node is on each host. Each actor imports torch, which takes seconds, so
    the prefill node has one."""
    routing = {"queue_timeout": 2, "request_timeout": 10, "heartbeat_timeout": 30}
    with WarmCluster(MODEL, 0, 0, router=routing) as cluster:
        decode = on_ray(raylets, kv_host="auto", insecure="", distributed_timeout=600)
        cluster.start_node("decode", **decode)
        cluster.start_node("prefill", **on_ray(raylets, pipeline_parallel_size=1))
        cluster.wait_nodes()
        yield cluster


def test_stages_on_two_hosts(split: WarmCluster) -> None:
    check(split)
    split.wait_idle()
    lines = re.findall("^.* INFO    prefill/0 - loading weights: 100 %", split.log(), re.M)
    assert len(lines) == 1


def test_a_node_is_drained(split: WarmCluster) -> None:
    (prefill,) = split.names("prefill")
    pid = split.drain(prefill)
    split.wait_for(lambda: split.exit_code(pid) == 0)


def test_stages_of_two_ranks() -> None:
    with Raylets() as raylets, WarmCluster(MODEL, 0, 0) as cluster:
        cluster.start_node("prefill", **on_ray(raylets, tensor_parallel_size=2))
        cluster.start_node("decode", tensor_parallel_size=2)
        cluster.wait_nodes()
        check(cluster)
        cluster.wait_idle()


def test_a_host_without_the_model(tmp_path: Path) -> None:
    """The second raylet sees an empty folder where the first one has the model."""
    folder = tmp_path / "models"
    shutil.copytree(MODELS / MODEL, folder / MODEL)
    with (
        Raylets(hidden=folder) as raylets,
        WarmCluster(folder / MODEL, 0, 0) as cluster,
    ):
        cluster.start_node("prefill")
        # Stages on both hosts; of which the first rank is, Ray decides.
        cluster.start_node("decode", **on_ray(raylets, load_broadcast=""))
        cluster.wait_nodes()
        check(cluster)
        cluster.wait_idle()
        pid = cluster.pids.pop(cluster.start_node("decode", **on_ray(raylets)))
        cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
        assert re.search(r"host .* has no folder .*, unless --load-broadcast", cluster.log())


def test_a_host_of_a_decode_node_dies(split: WarmCluster, raylets: Raylets) -> None:
    """The last one: it takes a raylet with it."""
    cluster = split
    cluster.start_node("prefill")
    cluster.wait_nodes()
    stream = cluster.stream([1, 2, 3], max_tokens=900, ignore_eos=True)
    assert next(stream)["choices"]
    (decode,) = cluster.names("decode")
    pid = cluster.pids.pop(decode)
    raylets.kill(1)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
    assert cluster.exit_code(pid) == 1
    assert re.search(r"rank \d \(host .*\) was lost: its host or the raylet", cluster.log())
    assert "error" in list(stream)[-1]
    assert "decode" in cluster.get("/ready").text
