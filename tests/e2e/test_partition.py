"""The network is cut while requests run: they go on elsewhere, and what heals is used again."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import requests

import reference
from benchmarks import hosts
from pdserve.router.http.request import TIMELINE_HEADER
from thinned import only, slow
from warm import WarmCluster, networked

pytestmark = pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())
PROMPT = tuple(range(5, 75))
NUM_TOKENS = 40
IN_FLIGHT = 6
PATIENCE = 8  # seconds, more than a breaker stays open
HOLD = float(os.environ.get("LONG_CUTS", "0"))  # seconds beyond what is needed to notice


class Site:
    """A prefill node and two decode nodes, each on a host of its own."""

    def __init__(self, network: hosts.Network, cluster: WarmCluster) -> None:
        self.network = network
        self.cluster = cluster
        self.hosts: dict[str, str] = {}  # by node
        self.prefill = self.start("prefill")
        self.decode = self.start("decode", num_gpu_blocks_override=400)  # the preferred one
        self.other = self.start("decode")
        cluster.wait_nodes()
        reference.greedy(cluster.model, PROMPT, NUM_TOKENS)  # nothing waits for it later

    def start(self, role: str, **options: Any) -> str:
        host, before = self.network.add("benchmarks.hosts:slow_steps", "0.03")
        router = f"{hosts.ROUTER}:{self.cluster.ports['registry']}"
        options |= {"host": host, "kv_host": host, "kv_connector": "tcp", "router": router}
        name = self.cluster.start_node(role, before, **options)
        self.hosts[name] = host
        return name

    def states(self) -> dict[str, str]:
        """By host."""
        return {n["address"].partition(":")[0]: n["state"] for n in self.cluster.nodes()}

    def wait_state(self, name: str, state: str) -> None:
        """One that is lost for long is not even named."""
        self.cluster.wait_for(lambda: self.states().get(self.hosts[name], "lost") == state)

    def ask(self) -> Iterator[dict[str, Any]]:
        return self.cluster.stream(list(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)

    def check(self, events: list[dict[str, Any]]) -> None:
        text = "".join(each["choices"][0]["text"] for each in events if each["choices"])
        tokens = reference.greedy(self.cluster.model, PROMPT, NUM_TOKENS)
        assert text == reference.decode(self.cluster.model, tokens)

    def serves(self) -> str:
        """The decode node that finished one more request."""
        answer = self._whole(NUM_TOKENS)
        self.check([answer])
        stages = answer["pdserve"]["timeline"]["stages"]
        *_, last = (stage["node"] for stage in stages if stage["name"] == "decode_compute")
        names = {node["node_id"]: node["name"] for node in self.cluster.state()["nodes"]}
        return str(names[last])

    def transferred(self) -> int:
        """Bytes of KV that crossed for one more request."""
        return int(self._whole(2)["pdserve"]["timeline"]["transfer_bytes"])

    def _whole(self, num_tokens: int) -> dict[str, Any]:
        """An answer and its timeline."""
        body = {"prompt": list(PROMPT), "max_tokens": num_tokens, "ignore_eos": True}
        response = requests.post(
            f"{self.cluster.url}/v1/completions",
            json={**body, "temperature": 0},
            headers={TIMELINE_HEADER: "1"},
            timeout=30,
        )
        return dict(response.json())


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    key = "of-this-test-and-no-other"
    router = {"queue_timeout": PATIENCE, "breaker_cooldown": 2, "cluster_key": key}
    options = {"kv_lease": 2, "no_enable_prefix_caching": "", "cluster_key": key}
    with networked("llama-gqa", router, **options) as (network, cluster):
        yield Site(network, cluster)


def test_a_decode_node_is_cut_off_in_mid_stream_and_comes_back(site: Site) -> None:
    stream = site.ask()
    events = list(islice(stream, 6))  # a router that is late tells of many tokens at once
    site.network.cut(site.hosts[site.decode])
    site.check(events + list(stream))
    site.wait_state(site.decode, "lost")
    site.network.heal(site.hosts[site.decode])
    site.wait_state(site.decode, "ready")
    site.cluster.wait_idle()
    site.cluster.wait_for(lambda: site.serves() == site.decode)  # nothing was restarted
    site.cluster.wait_idle()


def test_prefill_and_decode_nodes_that_do_not_reach_each_other(site: Site) -> None:
    assert site.transferred() > 0
    both = [site.hosts[name] for name in (site.prefill, site.decode, site.other)]
    site.network.isolate(*both)
    site.check(list(site.ask()))  # the decode node computes the prompt itself
    site.network.isolate(*both, isolated=False)
    site.cluster.wait_idle()
    site.cluster.wait_for(lambda: site.transferred() > 0)
    site.cluster.wait_idle()


@pytest.mark.parametrize("way", ["there", slow("both")])
def test_decode_nodes_compute_while_the_router_reaches_no_prefill_node(
    site: Site, way: str
) -> None:
    """Also when only the way from the router to it is cut, so that its heartbeats arrive."""
    host = site.hosts[site.prefill]
    if way == "there":
        site.network.drop(hosts.ROUTER, host)
    else:
        site.network.cut(host)
    site.check(list(site.ask()))  # within PATIENCE, or it is a 503
    site.wait_state(site.prefill, "lost")
    reason = site.cluster.get("/v1/cluster").json()["reason"]
    assert reason.startswith("decode nodes prefill: no usable prefill node")
    assert site.cluster.get("/ready").status_code == 200
    site.check(list(site.ask()))
    if way == "there":
        site.network.drop(hosts.ROUTER, host, False)
    else:
        site.network.heal(host)
    site.wait_state(site.prefill, "ready")
    site.cluster.wait_idle()
    site.cluster.wait_for(lambda: site.transferred() > 0)
    site.cluster.wait_idle()


# ---- every edge, one way and both ----


class Wide:
    """The site with two nodes of each role, under load."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.prefills = [site.prefill, site.start("prefill")]
        self.decodes = [site.decode, site.other]
        site.hosts["router"] = hosts.ROUTER
        site.cluster.wait_nodes()
        site.check(list(site.ask()))  # the reference is made on one thread

    def wait_whole(self) -> None:
        """Until every pair is used again."""
        self.site.cluster.wait_for(lambda: len(self.pairings()) == 4)

    def pairings(self) -> list[dict[str, str]]:
        pairings: list[dict[str, str]] = self.site.cluster.get("/v1/cluster").json()["pairings"]
        return pairings

    @contextmanager
    def cut(self, *edges: tuple[str, str]) -> Iterator[None]:
        """Drops what the first of each edge sends to the second."""
        for source, target in edges:
            self.site.network.drop(self.site.hosts[source], self.site.hosts[target])
        try:
            yield
        finally:
            for source, target in edges:
                self.site.network.drop(self.site.hosts[source], self.site.hosts[target], False)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Requests one after the other on several threads; each must get its right answer."""
        over = threading.Event()

        def ask() -> int:
            served = 0
            while not over.is_set():
                self.site.check(list(self.site.ask()))
                served += 1
            return served

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            asking = [pool.submit(ask) for _ in range(IN_FLIGHT)]
            try:
                self.site.cluster.wait_for(
                    lambda: self.site.cluster.get("/v1/cluster").json()["running"] == IN_FLIGHT
                )
                yield
            finally:
                over.set()
        assert all(each.result() for each in asking)


@pytest.fixture(scope="module")
def wide(site: Site) -> Wide:
    return Wide(site)


@pytest.mark.parametrize(
    ("edge", "way"),
    only(
        itertools.product(
            ("router-prefill", "router-decode", "prefill-decode"), ("there", "back", "both")
        ),
        [("router-prefill", "back"), ("router-decode", "there"), ("prefill-decode", "both")],
    ),
)
def test_an_edge_is_cut_under_load_and_nothing_is_lost(wide: Wide, edge: str, way: str) -> None:
    """`LONG_CUTS=30` holds each cut for so long."""
    places = {"router": ["router"], "prefill": wide.prefills[:1], "decode": wide.decodes[:1]}
    source, target = edge.split("-")
    if source == "prefill":  # all of them: no other pair is left
        places |= {"prefill": wide.prefills, "decode": wide.decodes}
    there = [(a, b) for a in places[source] for b in places[target]]
    back = [(b, a) for a, b in there]
    edges = {"there": there, "back": back, "both": there + back}[way]
    wide.wait_whole()
    with wide.load(), wide.cut(*edges):
        noticed = 0 if source == "prefill" else 2
        wide.site.cluster.wait_for(lambda: len(wide.pairings()) <= noticed)
        time.sleep(HOLD)
    wide.site.cluster.wait_idle()
