"""The tools that the soak spoils a cluster with do what they say, and its gauges see what they
should."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks import hosts, warm_start
from benchmarks.access import Refused
from benchmarks.fleet import Fleet
from benchmarks.hosts import ROUTER, Network, front
from benchmarks.relay import Relays
from benchmarks.site import site_network
from benchmarks.soak import load
from benchmarks.soak.asks import Ask
from benchmarks.soak.client import Answer
from benchmarks.soak.gauge import Gauge, Life, held_by_clients
from benchmarks.soak.inquiry import Found
from benchmarks.soak.load import Tally
from benchmarks.soak.report import make_report, print_report
from fakes_pipeline import byte_level_folder
from http_site import serve
from pdserve.router.api.auth import APIKeys

needs_network = pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())
PATIENCE = 30.0  # seconds for what should come
SILENCE = 0.3  # seconds in which nothing should


class Place:
    """A host with an echo behind a relay, and a host that calls it."""

    def __init__(self, network: Network, relays: Relays) -> None:
        self.network, self.relays = network, relays
        self.server, self.caller = network.add()[0], network.add()[0]
        with self.on(self.server):
            self.listener = socket.create_server((self.server, 0))
        self.port: int = self.listener.getsockname()[1]
        relays.add(network.pid(self.server), front(self.server), self.server, [self.port])

    def on(self, host: str) -> On:
        return On("/proc/self" if host == ROUTER else f"/proc/{self.network.pid(host)}")

    def connect(self, source: str) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection through the relay."""
        with self.on(source):
            ours = socket.create_connection((front(self.server), self.port), PATIENCE)
        theirs, _ = self.listener.accept()
        theirs.settimeout(PATIENCE)
        return ours, theirs


class On:
    """This thread is on another host meanwhile."""

    def __init__(self, process: str) -> None:
        self._path = f"{process}/ns/net"

    def __enter__(self) -> None:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(self._path, os.O_RDONLY)
        hosts.go(there)
        os.close(there)

    def __exit__(self, *_: object) -> None:
        hosts.go(self._home)
        os.close(self._home)


def said(source: socket.socket, target: socket.socket, data: bytes, patience: float) -> bytes:
    """Returns what arrives first of what is said; empty: nothing, in this time."""
    source.sendall(data)
    target.settimeout(patience)
    try:
        return target.recv(1 << 16)
    except TimeoutError:
        return b""


@pytest.fixture
def place() -> Iterator[Place]:
    with site_network() as (network, relays):
        yield Place(network, relays)


@needs_network
def test_an_edge_is_cut_one_way(place: Place) -> None:
    ours, theirs = place.connect(place.caller)
    with ours, theirs:
        assert said(ours, theirs, b"there", PATIENCE) and said(theirs, ours, b"back", PATIENCE)
        place.network.drop(place.server, place.caller)
        assert said(theirs, ours, b"lost for now", SILENCE) == b""
        assert said(ours, theirs, b"there", PATIENCE) == b"there"
        place.network.drop(place.server, place.caller, dropped=False)
        ours.settimeout(PATIENCE)
        assert ours.recv(100) == b"lost for now"


@needs_network
def test_a_relay_spoils_one_edge(place: Place) -> None:
    data = bytes(1000)
    near, near_end = place.connect(ROUTER)
    far, far_end = place.connect(place.caller)
    with near, near_end, far, far_end:
        place.relays.set(place.caller, front(place.server), "flip")
        seen = Counter(said(far, far_end, data, PATIENCE) for _ in range(60))
        assert seen.pop(data) and seen and place.relays.spoilt() == seen.total()
        assert all(sum(each).bit_count() == 1 for each in seen)
        assert {said(near, near_end, data, PATIENCE) for _ in range(60)} == {data}
        place.relays.set(place.caller, front(place.server), "truncate")
        with pytest.raises(ConnectionError):
            while said(far, far_end, data, PATIENCE) == data:
                pass
            for _ in range(2):  # the rest of the message never comes
                said(far, far_end, data, PATIENCE)
    assert place.relays.spoilt() == seen.total() + 1


KEEPER = """
import sys
from benchmarks.hosts import network
with network() as made:
    address, _ = made.add()
    print(made.enter_router[1], made.pid(address), flush=True)
    sys.stdin.read()
"""


@needs_network
@pytest.mark.parametrize("killed", [False, True])
def test_a_network_ends_with_its_process(killed: bool) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER],
        cwd=Path(hosts.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        residents = [psutil.Process(int(pid)) for pid in keeper.stdout.readline().split()]
        if killed:
            keeper.kill()
    keeper.wait(PATIENCE)
    assert len(residents) == 2
    _, alive = psutil.wait_procs(residents, PATIENCE)
    assert not alive


def test_a_process_may_have_the_pid_of_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(warm_start._codes, 4242, 0)
    monkeypatch.setattr(os, "fork", lambda: 4242)
    monkeypatch.setattr(warm_start, "_starters", {})
    with socket.socket() as starter:
        assert warm_start._start(starter, "router", [], "", [], {}) == 4242
    assert warm_start._exit_code(4242) is None
    assert signal.SIGCHLD not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_growth_is_detected() -> None:
    gauge = Gauge(None)  # type: ignore[arg-type]
    flat = Life("decode", [*range(60)], [200.0 + n % 5 for n in range(60)], [30.0] * 60)
    fat = Life("router", [*range(60)], [200.0 + 3 * n for n in range(60)], [30.0] * 60)
    young = Life("prefill", [*range(9)], [200.0 + 99 * n for n in range(9)], [30.0] * 9)
    gauge._lives = dict(enumerate((flat, fat, young)))
    growth = gauge.growth()
    assert growth.keys() == {"decode", "router"}
    assert growth["router"]["rss_mb"].grown and not growth["router"]["fds"].grown
    assert not growth["decode"]["rss_mb"].grown
    report = make_report(Tally(), 60.0, Counter(), {}, [], growth=growth)
    assert [name for name, count in report.failures.items() if count] == ["grown"]


def test_wrong_answers_to_hostile_clients_are_failures() -> None:
    told = Counter({("huge", "30 MB of text: hung"): 2, ("stranger", "asks a node: admitted"): 1})
    told["poison", "HTTP 400"] = 9
    report = make_report(Tally(), 60.0, Counter(), {}, [], told)
    assert report.failures["hung"] == 2 and report.failures["admitted"] == 1
    assert report.answers["poison"] == {"HTTP 400": 9}


def test_brackets_in_answers_are_shown() -> None:
    told = Counter({("poison", "tools[0] is [/wrong]"): 1})
    report = make_report(Tally(), 60.0, Counter(), {}, [], told)
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert "poison: tools[0] is [/wrong]" in console.file.getvalue()


def test_the_load_of_a_crowd_is_no_growth() -> None:
    gauge = Gauge(None)  # type: ignore[arg-type]
    crowd = [30.0] * 40 + [1300.0] * 10 + [30.0] * 10
    leak = [30.0] * 40 + [1300.0] * 10 + [600.0] * 10
    gauge._lives = {
        number: Life(role, [*range(60)], [200.0] * 60, fds)
        for number, (role, fds) in enumerate({"decode": crowd, "router": leak}.items())
    }
    growth = gauge.growth(lambda at: 40 <= at < 50)
    assert not growth["decode"]["fds"].grown and growth["decode"]["fds"].most == 1300
    assert growth["router"]["fds"].grown


def test_a_connection_is_its_client_s_until_the_client_leaves() -> None:
    process = psutil.Process()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [server.getsockname()[1]]
        assert held_by_clients(process, ports) == 0
        client = socket.create_connection(("127.0.0.1", ports[0]), PATIENCE)
        accepted, _ = server.accept()
        with accepted:
            assert held_by_clients(process, ports) == 1
            client.close()
            assert accepted.recv(1) == b""
            assert held_by_clients(process, ports) == 0


# ---- a request that does not end ----


class Clients:
    """A client whose answer comes when the test says so."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()

    async def send(self, ask: Ask, request_id: str, answer: Answer) -> Answer:
        assert request_id.startswith("soak-")
        await self.ready.wait()
        return Answer()


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT", "LOOKS", "LAST_LOOK"):
        monkeypatch.setattr(load, name, 0.001)


async def asked_once(found: Callable[[Clients], Found]) -> tuple[Tally, list[None]]:
    """Asks once, while routers say this of it; returns what became of it, and how often stacks
    were asked for."""
    client, looks = Clients(), list[None]()
    some = load.Load({"router": client}, [Ask("grpc", (5,), {})], lambda _: found(client))  # type: ignore[dict-item]
    some.expected = [[Answer()]]
    tally = await some.during(asyncio.sleep(0), 1, look=lambda: looks.append(None))
    return tally, looks


async def test_a_request_that_does_not_get_further_hangs_and_where_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(monkeypatch)
    tally, looks = await asked_once(lambda _: Found(False, True, "router: waits for d1"))
    assert len(tally.hung) == len(looks) == 1 and tally.hung[0].endswith("router: waits for d1")


async def test_a_request_that_gets_further_is_slow_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(monkeypatch)
    times = iter(range(20))

    def moves(client: Clients) -> Found:
        if next(times) == 9:
            loop.call_soon_threadsafe(client.ready.set)
        return Found(True, True, "")

    loop = asyncio.get_running_loop()
    tally, looks = await asked_once(moves)
    assert (tally.completed, tally.hung, looks) == (1, [], []) and next(times) >= 10


async def test_a_fleet_whose_key_is_refused_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would else wait for nodes of which it cannot hear."""
    warm: Any = SimpleNamespace()
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("sk", "an-operator")) as site:
        fleet = Fleet(tmp_path, tmp_path / "log", {}, {"admin_api_key": "wrong"}, warm)
        monkeypatch.setitem(fleet.routers["router"], "http", site.port)
        fleet.pids["router"] = os.getpid()
        with pytest.raises(Refused, match=r"router answers 401 to /v1/cluster.*admin_api_key"):
            await asyncio.to_thread(fleet.wait_ready)
