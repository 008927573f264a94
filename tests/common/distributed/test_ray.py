"""The Ray executor with a toy worker on a cluster of two raylets; what it is made of, without."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from test_executor import eventually

from benchmarks.fleet import free_port
from echo_worker import config
from pdserve.common.config.engine import ParallelConfig
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.distributed import wire
from pdserve.common.distributed.environment import (
    DistributedEnvironment,
    Rendezvous,
    init_distributed_environment,
)
from pdserve.common.distributed.launch import choose_backend, make_executor
from pdserve.common.distributed.wire import Link, NodeAddress, RankMessage
from pdserve.common.worker.worker import ExtensionConfig, build_worker, resolve_host, worker_specs
from processes import alive
from ray_toy import places, toys
from raylets import Raylets
from toy_worker import specs

ray = pytest.importorskip("ray")
zmq = pytest.importorskip("zmq")

from pdserve.common.distributed import ray_executor  # noqa: E402
from pdserve.common.distributed.ray_executor import RayExecutor  # noqa: E402

# ---- without a cluster ----


@pytest.mark.parametrize(
    ("requested", "ranks", "room", "answers", "backend"),
    [
        ("auto", 1, 1, True, ""),
        ("auto", 4, 4, True, "mp"),
        ("auto", 4, 2, True, "ray"),
        ("auto", 4, 2, False, "mp"),
        ("auto", 1, 0, True, "ray"),
        ("auto", 1, 0, False, ""),
        ("mp", 1, 0, True, "mp"),
        ("ray", 1, 8, False, "ray"),
    ],
)
def test_backend(requested: str, ranks: int, room: int, answers: bool, backend: str) -> None:
    assert choose_backend(requested, ranks, room, lambda: answers) == backend


RAY = ParallelConfig(distributed_executor_backend="ray", ray_address=f"127.0.0.1:{free_port()}")


def test_no_cluster_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for two minutes and then end the process."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with pytest.raises(ConfigError, match="ray start --head"):
        make_executor(specs(2), RAY)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "pdserve.common.distributed.ray_executor")
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[ray\]'"):
        make_executor(specs(2), RAY)


def test_ranks_meet_at_a_store_of_the_node() -> None:
    meeting = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(4) as pool:
        join = [
            pool.submit(init_distributed_environment, r, 4, meeting.init_method) for r in range(4)
        ]
        environments = [each.result() for each in join]
    assert all(len(each.hosts) == 4 and each.local_world_size == 4 for each in environments)
    assert {each.address for each in environments} == {"127.0.0.1"}


def ranks_on(*hosts: str, address: str = "10.0.0.3") -> DistributedEnvironment:
    import torch

    return DistributedEnvironment(
        0, len(hosts), torch.device("cpu"), 1.0, "auto", hosts=hosts, address=address
    )


def test_the_kv_host_of_a_rank() -> None:
    auto = ExtensionConfig("x", host="auto")
    assert resolve_host(auto, ranks_on("a", "b")).host == "10.0.0.3"
    elsewhere = resolve_host(auto, ranks_on("a", address="127.0.0.1")).host
    assert elsewhere == ranks_on("a", address="127.0.0.1").address_for_others
    assert resolve_host(ExtensionConfig("x"), ranks_on("a", "a")).host == "127.0.0.1"
    assert (
        resolve_host(ExtensionConfig("x", host="10.0.0.9"), ranks_on("a", "b")).host == "10.0.0.9"
    )
    for loopback in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(ConfigError, match="pass --kv-host auto"):
            resolve_host(ExtensionConfig("x", host=loopback), ranks_on("a", "b"))


def test_a_host_without_the_model_is_named() -> None:
    (spec,) = worker_specs(config())
    spec.config["engine"]["model"]["model"] = "/no/such/folder"
    with pytest.raises(ConfigError, match=f"host {os.uname().nodename} has no folder /no/such"):
        build_worker(spec, lambda event: None)


def test_a_host_with_other_weights_is_named() -> None:
    (spec,) = worker_specs(replace(config(), revision="0123456789abcdef"))
    sentence = f"host {os.uname().nodename} has other weights in .* than the node's host"
    with pytest.raises(ConfigError, match=sentence):
        build_worker(spec, lambda event: None)


def test_peers_without_the_key_are_not_heard() -> None:
    with zmq.Context() as context:
        node = context.socket(zmq.ROUTER)
        address = wire.listen(node, "127.0.0.1", 30.0)
        stranger, _ = zmq.curve_keypair()
        for number, key in enumerate(("", stranger.decode(), address.key)):
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            if key:
                peer.curve_serverkey = key.encode()
                peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.connect(address.url)
            with suppress(zmq.Again):  # a peer that is refused at once has no connection
                peer.send(b"%d" % number, zmq.NOBLOCK)
        assert node.poll(60_000) and node.recv_multipart()[1] == b"2"
        assert not node.poll(500)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("stages", "ranks", "room", "shares"),
    [
        (1, 16, [8, 8], [8, 4, 2, 1]),
        (2, 8, [8, 8], [8, 4, 2, 1]),
        (2, 4, [4, 2, 2], [2, 1]),
        (1, 4, [3, 1], [1]),
        (1, 3, [2, 2], [1]),
        (1, 4, [8], [4, 2, 1]),
        (1, 8, [2, 2], []),
        (1, 4, [], []),
    ],
)
def test_how_many_ranks_of_a_stage_share_a_host(
    stages: int, ranks: int, room: list[float], shares: list[int]
) -> None:
    assert ray_executor.shares_of_a_stage(stages, ranks, room) == shares


async def test_a_host_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is asked for a host with room for all, which may come, until a second one is there."""
    rooms = iter(({"a": 2.0}, {"a": 2.0}, {"a": 2.0, "b": 2.0}))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(ray_executor, "_units", lambda unit: next(rooms, {"a": 2.0, "b": 2.0}))

    async def reserve(
        bundles: int, size: int, unit: str, strategy: str = "", unless: Any = None
    ) -> str:
        asked.append((bundles, size))
        if size == 2:
            return "two on each"
        while not unless():
            await asyncio.sleep(0)
        raise ConfigError("not placed")

    monkeypatch.setattr(ray_executor, "reserve", reserve)
    found: Any = await ray_executor.reserve_stages(1, 4, "CPU")
    assert found == ("two on each", 2)
    assert asked == [(1, 4), (2, 2)]


RANK = """
import sys
from pdserve.common.distributed.rank_main import run_rank
from dataclasses import replace
from pdserve.common.distributed.wire import NodeAddress, code_version
from toy_worker import specs
url, key, timeout = sys.argv[1:]
run_rank(replace(specs(1)[0], version=code_version()), NodeAddress(url, key, float(timeout)))
"""


def start_rank(url: str, key: str, timeout: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RANK, url, key, str(timeout)]
    return subprocess.Popen(command, env=environment)


def wait_until_built(node: Any, rank: subprocess.Popen[bytes]) -> None:
    built = wire.start_number(0, Link.OUT)
    while (header := wire.HEADER.unpack(node.recv_multipart()[1]))[2] != built:
        pass
    assert header[1] == RankMessage.RESULT
    assert rank.poll() is None


def test_a_rank_ends_with_the_connection_to_its_node() -> None:
    context = zmq.Context()
    node = context.socket(zmq.ROUTER)
    address: NodeAddress = wire.listen(node, "127.0.0.1", 30.0)
    rank = start_rank(address.url, address.key, address.timeout)
    wait_until_built(node, rank)
    context.destroy(linger=0)
    assert rank.wait(60) == 1


def test_a_rank_ends_when_the_link_to_its_node_is_silent() -> None:
    """No connection breaks when a cable is cut."""
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as relay:
        node = context.socket(zmq.ROUTER)
        address: NodeAddress = wire.listen(node, "127.0.0.1", 5.0)
        cut, over = threading.Event(), threading.Event()
        carrier = threading.Thread(target=carry, args=(relay, address.url, cut, over))
        carrier.start()
        url = f"tcp://127.0.0.1:{relay.getsockname()[1]}"
        rank = start_rank(url, address.key, address.timeout)
        wait_until_built(node, rank)
        cut.set()
        try:
            assert rank.wait(60) == 1
        finally:
            over.set()
            carrier.join()
            rank.kill()
            context.destroy(linger=0)


def carry(relay: socket.socket, url: str, cut: threading.Event, over: threading.Event) -> None:
    """Carries bytes between what connects and `url` until the link is cut; connections stay until
    it is over."""
    with selectors.DefaultSelector() as ready, ExitStack() as stack:
        ready.register(relay, selectors.EVENT_READ)
        while not cut.is_set():
            for key, _ in ready.select(0.05):
                if key.data is None:
                    near = stack.enter_context(relay.accept()[0])
                    host, _, port = url.removeprefix("tcp://").rpartition(":")
                    far = stack.enter_context(socket.create_connection((host, int(port))))
                    ready.register(near, selectors.EVENT_READ, far)
                    ready.register(far, selectors.EVENT_READ, near)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    key.data.sendall(key.fileobj.recv(1 << 16))
        over.wait()


# ---- on a cluster ----


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with pytest.MonkeyPatch.context() as patch, Raylets() as cluster:
        patch.setenv("NCCL_DEBUG", "WARN")
        ray_executor.connect(cluster.address)
        yield cluster
        ray.shutdown()


@pytest.fixture
def all_free(raylets: Raylets) -> Iterator[None]:
    """Afterwards no actor and no placement group holds anything."""
    yield
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 4:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_a_stage_is_on_one_host_and_stages_are_on_several() -> None:
    executor = RayExecutor(toys(4), 2, "cpu")
    heard: list[tuple[int, bytes]] = []
    executor.on_event(lambda rank, event: heard.append((rank, event)))
    try:
        ranks = await places(executor)
        pids, nodes, worlds = zip(*ranks, strict=True)
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert worlds == (4,) * 4
        steps = await asyncio.gather(*(executor.step(b"%d" % i) for i in range(3)))
        assert steps == [b"step 0 0", b"step 0 1", b"step 0 2"]
        assert await executor.call(3, b"emit") == b"call 3 emit"
        assert heard == [(3, b"event")]
    finally:
        await executor.shutdown(5.0)
    await eventually(lambda: not any(map(alive, pids)))


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_a_dead_actor_is_named() -> None:
    executor = RayExecutor(toys(2), 1, "cpu")
    deaths: list[tuple[int, str]] = []
    executor.on_death(lambda rank, reason: deaths.append((rank, reason)))
    try:
        pids = [pid for pid, _, _ in await places(executor)]
        step = asyncio.create_task(executor.step(b"wait"))
        await executor.call(0, b"x")  # the step is on its way
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(NodeError, match=r"rank 1 \(host .*\) died: .*worker process has died"):
            await step
        await eventually(lambda: not any(map(alive, pids)))
    finally:
        await executor.shutdown(5.0)
    assert [rank for rank, _ in deaths] == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_a_start_that_fails_leaves_nothing() -> None:
    executor = RayExecutor(toys(2, fail_rank=1), 1, "cpu")
    with pytest.raises(ConfigError, match="no such folder"):
        await executor.start()


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "_PLACEMENT_TIMEOUT", 0.5)
    with pytest.raises(
        ConfigError, match=r"could not reserve 1 x 5 CPU .* has 2, .* has 2; 4 free in total"
    ):
        await RayExecutor(toys(5), 5, "cpu").start()


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_a_stage_that_no_host_has_room_for_is_on_several() -> None:
    executor = RayExecutor(toys(4), 4, "cpu")
    try:
        _, nodes, _ = zip(*await places(executor), strict=True)
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert await executor.step(b"0") == b"step 0 0"
    finally:
        await executor.shutdown(5.0)


NODE = """
import asyncio, sys
from ray_toy import places, toys
from pdserve.common.distributed.ray_executor import connect
from pdserve.common.distributed.ray_executor import RayExecutor

async def main():
    executor = RayExecutor(toys(2), 1, "cpu")
    died = asyncio.get_running_loop().create_future()
    executor.on_death(lambda rank, reason: died.set_result(reason))
    pids = [pid for pid, _, _ in await places(executor)]
    print("NODE", *pids, flush=True)
    print("NODE", await died, flush=True)
    await executor.shutdown(5.0)

connect(sys.argv[1])
asyncio.run(main())
"""


class Node:
    """A process of its own with an executor of two ranks, a stage each."""

    def __init__(self, raylets: Raylets) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", NODE, raylets.address]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
        )
        self.pids = [int(pid) for pid in self.says().split()]

    def says(self) -> str:
        """Its next line (Ray has lines of its own)."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("NODE "):
            assert line, "it ended"
        return line.removeprefix("NODE ")

    def ended(self) -> bool:
        return not any(map(alive, self.pids))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def node(raylets: Raylets) -> Iterator[Node]:
    with Node(raylets) as node:
        yield node


@pytest.mark.slow
@pytest.mark.usefixtures("all_free")
async def test_ranks_die_with_their_node(node: Node) -> None:
    assert not node.ended()
    node.process.kill()
    await eventually(node.ended)


# These two are the last ones: nothing is left of the cluster.


@pytest.mark.slow
async def test_a_dead_raylet(raylets: Raylets, node: Node) -> None:
    await check_death(node, lambda: raylets.kill(1), "was lost: its host or the raylet")


@pytest.mark.slow
async def test_a_dead_head(raylets: Raylets, node: Node) -> None:
    ray.shutdown()  # or this process would end with the head
    # `ray start --block` ends the head's raylet, too: either may be seen first.
    await check_death(node, lambda: raylets.kill(0, "gcs_server"), "lost")


async def check_death(node: Node, strike: Callable[[], None], reason: str) -> None:
    strike()
    assert reason in node.says()
    await eventually(node.ended, 60.0)
    assert node.process.wait(60) == 0  # without a head Ray takes some seconds to leave
