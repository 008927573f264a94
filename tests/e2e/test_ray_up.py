"""`pdserve up --on ray` over two raylets: two routers, `pdserve scale`, and a host that dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import reference
from callers import fresh_prompt
from cluster import Cluster
from pdserve.cli import scale
from pdserve.cli.ray_child import HOST, PORTS_FILE, Seat
from pdserve.cli.ray_cluster import Desk
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError
from raylets import Raylets

CPUS = 4  # of a raylet: two routers and two nodes, if the other one has died
IN_FLIGHT = 4
PATIENCE = 240.0  # seconds for a change of a role's size


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
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not scaled in {PATIENCE} s\n{self._last_words()}") from None

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


@pytest.mark.slow  # the parts of it are below
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
    assert "decode-1 has left" in cluster.log()
    cluster.wait_idle()


@pytest.mark.slow
def test_invalid_sizes_are_refused(cluster: RayCluster) -> None:
    for sizes, reason in (
        (["decode=0"], "prefill and decode nodes need each other"),
        (["decode=2", "--served-model-name", "other"], "clusters serve llama-gqa"),
    ):
        refused = cluster.scale(*sizes)
        assert refused.returncode == 2 and reason in refused.stderr
        assert refused.stderr.count("\n") == 1, "a sentence"
    check(cluster)


@pytest.mark.slow
def test_a_second_cluster_of_the_model_is_refused(cluster: RayCluster) -> None:
    program = str(Path(sys.executable).with_name("pdserve"))
    command = [program, "up", "--on", "ray", "--ray-address", cluster.raylets.address]
    second = subprocess.run(
        [*command, "--model", str(cluster.model)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert second.returncode == 2
    assert "llama-gqa runs on this Ray cluster already" in second.stderr


@pytest.mark.slow
def test_a_host_dies(cluster: RayCluster) -> None:
    """The last one: Ray loses a raylet. What ran there starts again on the other one."""
    cluster.raylets.kill(1)
    cluster.wait_for(lambda: "its host or its actor was lost" in cluster.log())
    cluster.wait_for(lambda: cluster.ready("prefill") == cluster.ready("decode") == 1, 180)
    check(cluster)


# ---- the parts, without Ray's processes ----


async def test_a_seat_runs_a_process_and_says_what_it_says() -> None:
    """Its host and folder are put into the command."""
    program = "import sys; print(sys.argv[1]); print(sys.argv[2]); sys.exit(3)"
    command = ["python", "-c", program, f"--host={HOST}", f"--file={PORTS_FILE}"]
    said = [each async for each in Seat().run("router", command, {})]
    *lines, code = said
    host, file = [line for batch in lines for line in batch]  # type: ignore[union-attr]
    assert code == 3
    assert host.removeprefix("--host=").count(".") == 3
    assert file.startswith("--file=/") and "{" not in file


async def test_a_desk_gives_answers_to_those_who_asked() -> None:
    desk = Desk()
    asked = [asyncio.create_task(desk.ask({"decode": size})) for size in (2, 3)]
    first, second = await desk.next(), await desk.next()
    assert (first[1], second[1]) == ({"decode": 2}, {"decode": 3})
    await desk.answer(second[0], "no room")
    await desk.answer(first[0], "")
    assert await asyncio.gather(*asked) == ["", "no room"]


def test_options_that_do_not_go_with_ray() -> None:
    for options, reason in (
        (["--host", "0.0.0.0"], "--host"),
        (["--distributed-executor-backend", "ray"], "places whole nodes"),
    ):
        with pytest.raises(SystemExit), redirect_stderr(StringIO()) as said:
            parse(ClusterConfig, prog="pdserve up", argv=["--on", "ray", *options])
        assert reason in said.getvalue()
    for words in ("decode", "decode=-1", "decode=many", "router=2"):
        with pytest.raises(ConfigError, match="give ROLE=N"):
            scale.parse_args([words])
