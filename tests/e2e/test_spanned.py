"""Nodes whose ranks are on two hosts with a network between them, which is then cut."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

import reference
import segments
from benchmarks import hosts
from cluster import text_of
from exact import prompts
from processes import alive
from thinned import slow
from warm import WarmCluster, networked, ranks_of, slowness

pytestmark = pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())
MODEL = "llama-gqa"
KEY = "of-this-test-and-no-other"
PROMPT = tuple(range(5, 75))
NUM_TOKENS = 40
SHORT = 12
IN_FLIGHT = 4
PREFERRED = {"num_gpu_blocks_override": 400}  # it has more blocks than others
SLOW_STEP = "0.1"  # seconds: answers last long enough to be cut off


class Site:
    """Nodes of which each rank group is on hosts of its own."""

    def __init__(self, network: hosts.Network, cluster: WarmCluster) -> None:
        self.network, self.cluster = network, cluster
        self.hosts: dict[str, list[str]] = {}  # by node

    def start(self, role: str, *beside: str, **options: Any) -> str:
        """A node on a host of its own; with `tensor_parallel_size` or `pipeline_parallel_size` its
        ranks are on this and another one, or on the hosts `beside`."""
        host, before = self.network.add()
        router = f"{hosts.ROUTER}:{self.cluster.ports['registry']}"
        own = {"host": host, "kv_host": host, "kv_connector": "tcp", "router": router}
        options = {**own, **options}
        ranks = [host]
        if any("parallel" in name for name in options):
            ranks = [*(beside or (host, self.network.add()[0]))]
            timeout = 8 * slowness()
            pids = [str(self.network.pid(each)) for each in ranks]
            over = ("benchmarks.apart:over", host, str(timeout), SLOW_STEP)
            before = (*before, *over, *pids)
            options |= {"kv_host": "auto", "distributed_timeout": timeout}
        else:
            before = (*before, "benchmarks.hosts:slow_steps", SLOW_STEP)
        name = self.cluster.start_node(role, before, **options)
        self.hosts[name] = ranks
        return name

    def ask(self) -> Iterator[dict[str, Any]]:
        return self.cluster.stream(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)

    def bits(self, salt: str) -> str:
        """All that is said of an answer."""
        body = {"max_tokens": SHORT, "ignore_eos": True, "logprobs": 3, "cache_salt": salt}
        return json.dumps(self.cluster.complete(list(PROMPT), **body)["choices"])

    @property
    def expected(self) -> str:
        tokens = reference.greedy(self.cluster.model, PROMPT, NUM_TOKENS)
        return reference.decode(self.cluster.model, tokens)


@contextmanager
def a_site() -> Iterator[Site]:
    router = {"cluster_key": KEY, "request_timeout": 20 * slowness()}
    with networked(MODEL, router, cluster_key=KEY, kv_lease=5) as (network, cluster):
        yield Site(network, cluster)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The decode node has two ranks on each of two hosts."""
    with a_site() as made:
        made.start("prefill")
        made.start("decode", tensor_parallel_size=4, **PREFERRED)
        made.cluster.wait_nodes()
        yield made


@pytest.fixture(scope="module")
def bits(site: Site) -> str:
    return site.bits("spanned")


def check(cluster: WarmCluster) -> None:
    for case in prompts(cluster.model)[::4]:
        answer = cluster.complete(list(case), max_tokens=SHORT, ignore_eos=True)
        expected = reference.greedy(cluster.model, case, SHORT)
        assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


@pytest.mark.usefixtures("bits")
def test_a_stage_on_two_hosts_equals_transformers(site: Site) -> None:
    check(site.cluster)
    one, other = next(ranks for ranks in site.hosts.values() if len(ranks) > 1)
    link = f"the slowest link between them, {one} – {other}, takes "
    line = rf"tensor-parallel ranks are on 2 hosts: {link}\S+ ms and carries \S+ MB/s, so 9 all-red"
    assert re.search(line, site.cluster.log())
    site.cluster.wait_idle()


@pytest.mark.parametrize("way", ["both ways", slow("there"), slow("back"), slow("killed")])
def test_a_cut_link_ends_the_node_and_nothing_else(
    site: Site, bits: str, way: str, request: pytest.FixtureRequest
) -> None:
    """Packets are dropped silently while it decodes, or all processes of the second host are killed
    at once. What it had goes on elsewhere, and the answers of one rank have the same bits."""
    cluster, names = site.cluster, segments.names()
    if not cluster.names("decode")[1:]:
        site.start("decode")
    if not any(len(site.hosts[name]) > 1 for name in cluster.names("decode")):
        site.start("decode", tensor_parallel_size=4, **PREFERRED)
    cluster.wait_nodes()
    spanned = next(name for name in cluster.names("decode") if len(site.hosts[name]) > 1)
    one, other = site.hosts[spanned]
    ranks = ranks_of(cluster.pids[spanned])
    assert len(ranks) == 4
    expected = site.expected  # nothing waits for it later
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        first = site.ask()
        events = list(islice(first, 6))
        assert cluster.busy("decode") == spanned
        others = [pool.submit(text_of, site.ask()) for _ in range(IN_FLIGHT - 1)]
        pid = cluster.pids.pop(spanned)
        if way == "killed":
            kill_host(site.network, other, [rank.pid for rank in ranks])
        else:
            cut(site.network, way, one, other)
        assert text_of(iter([*events, *first])) == expected
        assert all(each.result() == expected for each in others)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None, timeout=600)  # its own is shorter
    assert cluster.exit_code(pid) == 1
    silent = (
        rf"no answer from rank 2 on host {other} to rank 0 on host {one} within \S+ s: check the "
        r"link between the hosts"
    )
    died = r"RANK_DIED, blame=decode\] rank [23] \(pid \d+\) was killed by SIGKILL"
    assert re.search(died if way == "killed" else silent, cluster.log())
    cluster.wait_for(lambda: not any(alive(rank.pid) for rank in ranks), 60 * slowness())
    cluster.wait_idle()
    segments.check_none_left(names)
    assert site.bits(way) == bits


def kill_host(network: hosts.Network, host: str, pids: list[int]) -> None:
    """SIGKILL for those of these processes that are on the host."""
    there = os.readlink(f"/proc/{network.pid(host)}/ns/net")
    killed = [pid for pid in pids if os.readlink(f"/proc/{pid}/ns/net") == there]
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)


def cut(network: hosts.Network, way: str, one: str, other: str) -> None:
    if way == "both ways":
        network.cut(other)
    else:
        network.drop(*((one, other) if way == "there" else (other, one)))


@pytest.mark.slow
def test_a_cut_link_between_two_other_hosts() -> None:
    """The node reaches both, and they it."""
    with a_site() as site:
        cluster = site.cluster
        one, other = (site.network.add()[0] for _ in range(2))
        site.start("prefill")
        name = site.start("decode", one, other, tensor_parallel_size=2, **PREFERRED)
        site.start("decode")
        cluster.wait_nodes()
        expected = site.expected
        stream = site.ask()
        events = list(islice(stream, 6))
        pid = cluster.pids.pop(name)
        site.network.isolate(one, other)
        assert text_of(iter([*events, *stream])) == expected
        cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
        assert cluster.exit_code(pid) == 1
        assert re.search(rf"no answer from rank \d on host ({one}|{other}) to rank", cluster.log())
        cluster.wait_idle()


LAYOUTS = {  # of a node, and the hosts of its ranks by number
    "prefill, TP 2": ("prefill", {"tensor_parallel_size": 2}, "01"),
    "decode, TP 2": ("decode", {"tensor_parallel_size": 2}, "01"),
    "prefill, TP 4": ("prefill", {"tensor_parallel_size": 4}, "0011"),
    "prefill, TP 4, unequal": ("prefill", {"tensor_parallel_size": 4}, "0111"),
    "prefill, PP 2": ("prefill", {"pipeline_parallel_size": 2}, "01"),
    "decode, TP 2 × PP 2, stages on hosts": (
        "decode",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "0011",
    ),
    "decode, TP 2 × PP 2, both on both": (
        "decode",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "0101",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(layout: str) -> None:
    role, options, numbers = LAYOUTS[layout]
    with a_site() as site:
        beside = [site.network.add()[0] for _ in range(2)]
        site.start("decode" if role == "prefill" else "prefill")
        name = site.start(role, *(beside[int(number)] for number in numbers), **options)
        site.cluster.wait_nodes()
        check(site.cluster)
        if "unequal" in layout:  # it adds up in another order
            return
        spanned = site.bits("spanned")
        site.cluster.wait_idle()
        pid = site.cluster.drain(name)
        site.start(role)
        site.cluster.wait_for(lambda: site.cluster.exit_code(pid) == 0)
        site.cluster.wait_nodes()
        assert site.bits("alone") == spanned


@pytest.mark.slow
def test_a_slow_link_ends_nothing() -> None:
    with a_site() as site:
        ranks = [site.network.add()[0] for _ in range(2)]
        for host in ranks:
            if not site.network.slow(host, "20mbit"):
                pytest.skip("the kernel has no token bucket filter (tc, sch_tbf)")
        site.start("prefill")
        name = site.start("decode", *ranks, tensor_parallel_size=2)
        site.cluster.wait_nodes()
        found = re.search(r"carries (\S+) MB/s", site.cluster.log())
        assert found and float(found[1]) < 10  # MB/s: a quarter of a byte a bit, and bursts
        assert text_of(site.ask()) == site.expected
        check(site.cluster)
        site.cluster.wait_idle()
        assert name in site.cluster.ready()
