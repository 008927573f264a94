"""`pdserve up --on ray` over two raylets: who is placed where, `pdserve scale`, and a host that dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import reference
from callers import fresh_prompt
from cluster import Cluster
from pdserve.cli import scale
from pdserve.common.core.errors import ConfigError
from raylets import Raylets

CPUS = 3  # of a raylet: a router, and two nodes
IN_FLIGHT = 4


class RayCluster(Cluster):
    """Its routers listen at the address of their hosts, which is one here."""

    def __init__(self, raylets: Raylets, **options: Any) -> None:
        self.raylets = raylets
        on = {"on": "ray", "ray_address": raylets.address, "restart": "on-failure"}
        super().__init__("llama-gqa", routers=2, **on, **options)

    @property
    def url(self) -> str:
        return f"http://{self.raylets.address.rpartition(':')[0]}:{self.ports['http']}"

    def scale(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("pdserve"))
        command = [program, "scale", *arguments, "--ray-address", self.raylets.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def ready(self, role: str) -> int:
        return sum(node["state"] == "ready" for node in self.nodes(role))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with Raylets(cpus=CPUS) as raylets, RayCluster(raylets) as made:
        yield made


def check(cluster: RayCluster) -> None:
    prompt = tuple(fresh_prompt(40))
    answer = cluster.complete(list(prompt), max_tokens=12, ignore_eos=True)
    expected = reference.greedy(cluster.model, prompt, 12)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


def test_a_role_is_scaled_under_load(cluster: RayCluster) -> None:
    """Up and down again; nothing is lost."""
    check(cluster)
    over = False

    def ask() -> int:
        asked = 0
        while not over:
            cluster.complete(fresh_prompt(40), max_tokens=8, ignore_eos=True)
            asked += 1
        return asked

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        clients = [pool.submit(ask) for _ in range(IN_FLIGHT)]
        try:
            for size in (2, 1):
                scaled = cluster.scale(f"decode={size}")
                assert (scaled.returncode, scaled.stdout) == (0, f"decode: {size}\n"), scaled
                assert cluster.ready("decode") == size
        finally:
            over = True
        assert all(client.result() for client in clients)
    assert "decode-1 has drained and left" in cluster.log()
    cluster.wait_idle()


def test_what_cannot_be_scaled(cluster: RayCluster) -> None:
    for sizes, reason in (
        (["decode=0"], "prefill and decode nodes need each other"),
        (["decode=2", "--served-model-name", "other"], "that run serve llama-gqa"),
    ):
        refused = cluster.scale(*sizes)
        assert refused.returncode == 2 and reason in refused.stderr
        assert refused.stderr.count("\n") == 1, "a sentence"
    for words in ("decode", "decode=-1", "decode=many", "router=2"):
        with pytest.raises(ConfigError, match="give ROLE=N"):
            scale.parse_args([words])
    check(cluster)


def test_a_second_cluster_of_the_model_is_refused(cluster: RayCluster) -> None:
    program = str(Path(sys.executable).with_name("pdserve"))
    command = [program, "up", "--on", "ray", "--ray-address", cluster.raylets.address]
    second = subprocess.run(
        [*command, "--model", str(cluster.model)], capture_output=True, text=True, timeout=120
    )
    assert second.returncode == 2
    assert "llama-gqa runs on this Ray cluster already" in second.stderr


@pytest.mark.slow
def test_a_host_dies(cluster: RayCluster) -> None:
    """The last one: Ray loses a raylet. Its nodes start again on the other one, and the router
    there serves."""
    cluster.raylets.kill(1)
    cluster.wait_for(lambda: "its host or its actor was lost" in cluster.log())
    if "router: its host" in cluster.log() or "router-0: its host" in cluster.log():
        number = cluster.log().count("x")
    cluster.wait_ready()
    check(cluster)
