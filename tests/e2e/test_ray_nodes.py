"""Nodes whose ranks are actors of a Ray cluster with two raylets, a pipeline stage on each."""

from __future__ import annotations

import re
import shutil
import time
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


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def split_prefill(raylets: Raylets, request: pytest.FixtureRequest) -> Iterator[WarmCluster]:
    """Each actor imports torch, so `make test` has one on each host."""
    with WarmCluster(MODEL, 0, 0) as cluster:
        cluster.start_node("prefill", **on_ray(raylets, tensor_parallel_size=request.param))
        cluster.start_node("decode", tensor_parallel_size=2)
        cluster.wait_nodes()
        yield cluster


def test_prefill_on_two_hosts(split_prefill: WarmCluster) -> None:
    check(split_prefill)
    split_prefill.wait_idle()
    lines = re.findall("^.* INFO    prefill/0 - loading weights: 100 %", split_prefill.log(), re.M)
    assert len(lines) == 1


def test_a_node_on_two_hosts_is_drained(split_prefill: WarmCluster) -> None:
    (prefill,) = split_prefill.names("prefill")
    pid = split_prefill.drain(prefill)
    split_prefill.wait_for(lambda: split_prefill.exit_code(pid) == 0)


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def split_decode(raylets: Raylets) -> Iterator[WarmCluster]:
    routing = {"queue_timeout": 2, "request_timeout": 10, "heartbeat_timeout": 30}
    with WarmCluster(MODEL, 0, 0, router=routing) as cluster:
        cluster.start_node("prefill")
        cluster.start_node("decode", **on_ray(raylets, kv_host="auto", insecure=""))
        cluster.wait_nodes()
        yield cluster


def test_decode_on_two_hosts(split_decode: WarmCluster) -> None:
    check(split_decode)
    split_decode.wait_idle()


def test_a_host_of_a_decode_node_dies(split_decode: WarmCluster, raylets: Raylets) -> None:
    """The last one: it takes a raylet with it."""
    cluster = split_decode
    stream = cluster.stream([1, 2, 3], max_tokens=900, ignore_eos=True)
    assert next(stream)["choices"]
    (decode,) = cluster.names("decode")
    pid = cluster.pids.pop(decode)
    started = time.monotonic()
    raylets.kill(1)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
    assert time.monotonic() - started < 25  # sooner than by --distributed-timeout
    assert cluster.exit_code(pid) == 1
    assert re.search(r"rank \d \(host .*\) was lost: its host or the raylet", cluster.log())
    assert "error" in list(stream)[-1]
    assert "decode" in cluster.get("/ready").text
