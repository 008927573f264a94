"""Nodes whose ranks Ray has placed on two raylets with a network between them, which is cut."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

from test_spanned import SLOW_STEP, Site, a_site, check

import segments
from benchmarks import hosts
from cluster import text_of
from raylets import Raylets
from warm import slowness

REASON = hosts.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture
def site() -> Iterator[Site]:
    with a_site() as made:
        yield made


def start(site: Site, raylets: Raylets, role: str, size: int) -> str:
    """A node of `size` ranks, on the head's host."""
    head = raylets.hosts[0]
    before = ("benchmarks.hosts:enter", str(site.network.pid(head)))
    options: dict[str, Any] = {
        "host": head,
        "kv_host": "auto",
        "kv_connector": "tcp",
        "router": f"{hosts.ROUTER}:{site.cluster.ports['registry']}",
        "distributed_executor_backend": "ray",
        "ray_address": raylets.address,
        "tensor_parallel_size": size,
        "distributed_timeout": 30 * slowness(),
        "num_gpu_blocks_override": 400,  # it is preferred
    }
    slow = ("benchmarks.hosts:slow_steps", SLOW_STEP)
    return site.cluster.start_node(role, (*before, *slow), **options)


@pytest.mark.parametrize(("role", "size"), [("prefill", 2), ("decode", 2), ("prefill", 4)])
def test_a_stage_on_two_raylets(site: Site, role: str, size: int) -> None:
    with Raylets(cpus=size // 2, network=site.network) as raylets:
        site.start("decode" if role == "prefill" else "prefill")
        name = start(site, raylets, role, size)
        site.cluster.wait_nodes()
        check(site.cluster)
        bits = site.bits("spanned")
        log = site.cluster.log()
        hosts_in_order = re.findall(rf"(?<={size // 2} on host )[0-9.]+", log)[:2]  # as Ray placed
        assert sorted(hosts_in_order) == raylets.hosts
        link = " – ".join(hosts_in_order)
        assert f"the slowest link between them, {link}, takes " in log
        site.cluster.wait_idle()
        pid = site.cluster.drain(name)
        site.start(role)
        site.cluster.wait_for(lambda: site.cluster.exit_code(pid) == 0)
        site.cluster.wait_nodes()
        assert site.bits("alone") == bits


def test_the_link_between_raylets_is_cut(site: Site) -> None:
    """The time-out of the ranks or Ray's check of the hosts ends the node, whichever is first."""
    cluster, names = site.cluster, segments.names()
    with Raylets(cpus=2, network=site.network) as raylets:
        site.start("prefill")
        site.start("decode")
        name = start(site, raylets, "decode", 4)
        cluster.wait_nodes()
        ranks = ranks_on(site.network, raylets.hosts)
        assert len(ranks) == 4
        expected = site.expected
        stream = site.ask()
        events = list(islice(stream, 6))
        assert cluster.busy("decode") == name
        pid = cluster.pids.pop(name)
        site.network.cut(raylets.hosts[1])
        assert text_of(iter([*events, *stream])) == expected
        cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
        assert cluster.exit_code(pid) == 1
        host = "|".join(map(re.escape, raylets.hosts))
        silent = rf"no answer from rank \d on host ({host}) to rank \d on host ({host}) within"
        gone = rf"rank \d \(host {raylets.hosts[1]}\) (died|was lost)"
        assert re.search(f"{silent}|{gone}", cluster.log())
        cluster.wait_for(lambda: not any(each.is_running() for each in ranks), 60 * slowness())
        cluster.wait_idle()
    segments.check_none_left(names)


def ranks_on(network: hosts.Network, addresses: list[str]) -> list[psutil.Process]:
    """The processes of actors on these hosts."""
    spaces = {os.readlink(f"/proc/{network.pid(address)}/ns/net") for address in addresses}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            actor = process.cmdline()[:1] == ["ray::RayRank.run"]
            if actor and os.readlink(f"/proc/{process.pid}/ns/net") in spaces:
                found.append(process)
    return found
