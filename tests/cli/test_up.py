"""`pdserve up` with fake roles: order, restart rule, draining, and that nothing is left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from rich.console import Console

from paths import HELPERS, MODELS
from pdserve.cli import child as child_module
from pdserve.cli import cluster as cluster_module
from pdserve.cli import host_share
from pdserve.cli import restarts as restarts_module
from pdserve.cli.cluster import Cluster
from pdserve.cli.host_share import CoreTable, NodeShare, node_shares, share_host
from pdserve.cli.up import log_writer
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import CacheConfig, EngineConfig, ParallelConfig
from pdserve.common.config.router import ServerConfig
from pdserve.common.core.core_table import lent_seconds
from pdserve.common.core.errors import ConfigError, NodeError
from processes import alive
from thinned import slow
from waiting import eventually

FAKE_ROLE = str(HELPERS / "fake_role.py")
FAKES = {
    role: (sys.executable, FAKE_ROLE, role) for role in ("router", "prefill", "decode", "both")
}
UP = f"""
import sys
from pdserve.cli import cluster, up
cluster.PROGRAMS.update({FAKES!r})
sys.exit(up.main(["--port=0", "--model={MODELS / "llama-gqa"}", *sys.argv[1:]]))
"""


class Lines:
    """The lines that the children wrote, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.all.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.all if who == name]

    async def wait_for_all(self, *names: str) -> None:
        """Until each has spoken: the fake router is ready with two nodes, whichever they are."""
        await eventually(lambda: all(map(self.of, names)))

    def pid(self, name: str) -> int:
        return int(self.of(name)[0].split()[2])

    def starts(self, name: str) -> list[str]:
        return [line for line in self.of(name) if " pid " in line]

    def flags(self, name: str) -> dict[str, str]:
        return json.loads(self.of(name)[0].partition(" flags ")[2])


def make(lines: Lines, **options: object) -> Cluster:
    server = ServerConfig(port=0, grpc_port=0, registry_port=0, drain_timeout=5.0)
    config = ClusterConfig(**{"server": server, **options})  # type: ignore[arg-type]
    count = sum(config.nodes.values())
    return Cluster(config, [NodeShare(config.engine)] * count, lines, FAKES)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@asynccontextmanager
async def running(lines: Lines, **options: object) -> AsyncIterator[Cluster]:
    cluster = make(lines, **options)
    try:
        assert await cluster.start()
        yield cluster
    finally:
        await asyncio.wait_for(cluster.stop(), 60)


async def kill_again_and_again(lines: Lines, name: str, times: int) -> None:
    """Kills it as often as it is started, up to so many times."""
    for number in range(1, times + 1):
        await eventually(lambda number=number: len(lines.starts(name)) >= number)
        os.kill(int(lines.starts(name)[-1].split()[2]), signal.SIGKILL)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setattr(restarts_module, "FIRST_BACKOFF", 0.001)
    return Lines()


async def test_starts_all_and_drains_the_router_before_the_nodes(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "busy")
    async with running(lines, prefill=1, decode=2) as cluster:
        await lines.wait_for_all("prefill-0", "decode-0", "decode-1")
        cluster.interrupt()
        await cluster.ended
    names = ["router", "prefill-0", "decode-0", "decode-1"]
    drained = [name for name, line in lines.all if line.endswith("drained")]
    assert drained[0] == "router"
    assert sorted(drained) == sorted(names)
    assert not any(alive(lines.pid(name)) for name in names)


async def test_children_take_options_from_flags_alone(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_HOST", "0.0.0.0")
    monkeypatch.setenv("PDSERVE_CACHE", "/cache")
    ports = {"port": 0, "grpc_port": 0, "registry_port": 0}
    server = ServerConfig(**ports, api_key="correct-horse", admin_api_key="battery-staple")
    engine = EngineConfig(cache=CacheConfig(block_size=32))
    async with running(lines, engine=engine, server=server):
        pass
    # Secrets are the exception: everybody on the host can read a command line.
    shared = ["PDSERVE_CACHE", "PDSERVE_CLUSTER_KEY"]
    router = ["PDSERVE_ADMIN_API_KEY", "PDSERVE_API_KEY", *shared]
    for name, options in (("router", router), ("prefill-0", shared), ("decode-0", shared)):
        assert not [flag for flag in lines.flags(name) if "key" in flag]
        assert sorted(re.findall(r"PDSERVE_\w+", lines.of(name)[1])) == options
    assert lines.flags("prefill-0")["block-size"] == "32"
    assert "block-size" not in lines.flags("router")


@pytest.mark.parametrize("role", ["router", slow("prefill"), "decode"])
async def test_a_restart_loop_ends(
    lines: Lines, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"FAKE_{role.upper()}", "crash")
    with pytest.raises(NodeError, match="ended 6 times in a row, at last with exit code 3"):
        async with running(lines):
            pass
    again = [line for line in lines.of("up") if "; restart " in line]
    assert len(again) == restarts_module.MAX_RESTARTS


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"decode": 2}, "decode-1"), slow({"both": 1, "prefill": 1, "decode": 1}, "both-0"),
     slow({"both": 1, "prefill": 1, "decode": 1}, "prefill-0")],
)  # fmt: skip
async def test_the_others_go_on_without_a_node_in_a_restart_loop(
    lines: Lines, sizes: dict[str, int], name: str
) -> None:
    async with running(lines, **sizes) as cluster:
        await lines.wait_for_all(*cluster_module.node_names(cluster.config))
        await kill_again_and_again(lines, name, restarts_module.MAX_RESTARTS + 1)
        await eventually(lambda: "stays down" in lines.of("up")[-1])
        assert not cluster.ended.done() and alive(lines.pid("decode-0"))


async def test_a_process_that_has_lived_is_started_again_at_once(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: what it died of is not how it is started."""
    monkeypatch.setattr(restarts_module, "SETTLED", 0.0)
    async with running(lines):
        times = restarts_module.MAX_RESTARTS + 3
        await kill_again_and_again(lines, "decode-0", times)
        await eventually(lambda: len(lines.starts("decode-0")) > times)


async def test_up_says_when_a_killed_router_serves_again(lines: Lines) -> None:
    """It is started at once, and serves when the nodes have registered again."""
    again = list[asyncio.StreamWriter]()

    def told() -> list[str]:  # on a slow machine the start is announced, too
        return [line for line in lines.of("up") if not line.startswith("waiting for ")]

    async with running(lines):
        os.kill(lines.pid("router"), signal.SIGKILL)
        await eventually(lambda: len(lines.starts("router")) == 2)
        assert told() == ["router: signal 9; restart now"]
        host, _, port = lines.flags("decode-0")["router"].rpartition(":")
        while len(again) < 2:  # the fake nodes do not register again themselves
            with suppress(ConnectionRefusedError):
                again.append((await asyncio.open_connection(host, int(port)))[1])
            await asyncio.sleep(0.02)
        await eventually(lambda: len(told()) == 2)
        assert re.fullmatch(r"router: serving again, \d+\.\d s after it ended", told()[1])
        for writer in again:
            writer.close()


async def test_a_cluster_of_two_routers_serves_without_one(lines: Lines) -> None:
    """Each node is told both; one that is in a restart loop stays down, and the other goes on."""
    async with running(lines, routers=2) as cluster:
        await lines.wait_for_all("router-0", "router-1", "prefill-0", "decode-0")
        assert len(set(cluster.urls)) == 2 and cluster.url == cluster.urls[0]
        assert len(lines.flags("decode-0")["router"].split(",")) == 2
        await kill_again_and_again(lines, "router-1", restarts_module.MAX_RESTARTS + 1)
        await eventually(lambda: "stays down" in lines.of("up")[-1])
        assert not cluster.ended.done() and alive(lines.pid("router-0"))


async def test_wrong_options_are_never_started_again(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PREFILL", "misconfigured")
    with pytest.raises(ConfigError, match="prefill-0 cannot start as configured"):
        async with running(lines, restart="on-failure"):
            pass


async def test_a_drained_node_leaves_the_others_running(lines: Lines) -> None:
    async with running(lines, decode=2) as cluster:
        await lines.wait_for_all("decode-0", "decode-1")
        os.kill(lines.pid("decode-1"), signal.SIGTERM)
        await eventually(lambda: lines.of("up")[-1:] == ["decode-1 has drained and left"])
        assert sum(not line.startswith("waiting for ") for line in lines.of("up")) == 1
        assert not cluster.ended.done()
        assert alive(lines.pid("decode-0"))


@pytest.mark.parametrize("interrupts", [0, 3])
async def test_a_child_that_ignores_sigterm_is_killed(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    """After a grace, or at once at the third interrupt."""
    monkeypatch.setenv("FAKE_DECODE", "deaf")
    if not interrupts:
        monkeypatch.setattr(cluster_module, "KILL_GRACE", 2.0)  # for those that do stop
    drain = 5.0 if interrupts else 0.0
    server = ServerConfig(port=0, grpc_port=0, registry_port=0, drain_timeout=drain)
    async with running(lines, server=server) as cluster:
        for _ in range(interrupts):
            cluster.interrupt()
    assert not alive(lines.pid("decode-0"))
    killed = [line for line in lines.of("up") if "decode-0 did not stop within" in line]
    assert killed == ([] if interrupts else ["decode-0 did not stop within 2 s: killed"])


async def test_an_interrupt_while_starting_stops_what_has_started(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PREFILL", "leave")  # so that the router is never ready
    cluster = make(lines)
    starting = asyncio.create_task(cluster.start())
    try:
        await eventually(lambda: lines.of("decode-0"))
        cluster.interrupt()
        assert await starting is False
    finally:
        await cluster.stop()
    assert not alive(lines.pid("router"))
    assert not alive(lines.pid("decode-0"))


async def test_a_host_that_cannot_start_a_process_now_is_asked_again(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EAGAIN, "busy")]
    start = child_module.Child.start

    async def refuse(self: child_module.Child) -> None:
        if self.name == "decode-0" and lines.of("decode-0") and refusals:
            raise refusals.pop(0)
        await start(self)

    monkeypatch.setattr(child_module.Child, "start", refuse)
    async with running(lines, restart="on-failure"):
        await lines.wait_for_all("decode-0")
        os.kill(lines.pid("decode-0"), signal.SIGKILL)
        await eventually(lambda: len(lines.starts("decode-0")) == 2)
    assert any("decode-0: Too many open files; retry in " in line for line in lines.of("up"))


# ---- the command ----


def start_up(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UP, *flags], stderr=subprocess.PIPE, text=True, bufsize=1
    )


def read_until_ready(up: subprocess.Popen[str]) -> tuple[str, list[int]]:
    """The output so far and the children's process ids."""
    assert up.stderr is not None
    output = ""
    for line in up.stderr:
        output += line
        if line.startswith("cluster ready: "):
            break
    return output, [int(pid) for pid in re.findall(r" pid (\d+)", output)]


def test_up_prints_one_log_and_ends_with_zero_on_ctrl_c() -> None:
    up = start_up()
    output, pids = read_until_ready(up)
    up.send_signal(signal.SIGINT)
    _, rest = up.communicate(timeout=120)
    assert up.returncode == 0, output + rest
    ready = r"cluster ready: (http://127.0.0.1:\d+)/v1 \(model llama-gqa\); the page: \1/ui\n"
    assert re.search(ready, output)
    assert "prefill-0 │ prefill pid " in output
    assert "router    │ router drained" in rest
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


def test_a_full_disk_under_the_log_stops_nothing() -> None:
    """/dev/full is one. What the roles say is still taken from them, or they would wait for it."""
    ports = Path(tempfile.mkdtemp()) / "ports.json"
    with open("/dev/full", "w") as full:
        up = subprocess.Popen([sys.executable, "-c", UP, f"--ports-file={ports}"], stderr=full)
    try:
        assert wait_until(lambda: is_ready(ports))
        assert up.poll() is None
    finally:
        up.send_signal(signal.SIGINT)
        code = up.wait(60)
        shutil.rmtree(ports.parent)
    assert code == 0


def is_ready(ports: Path) -> bool:
    """Whether the fake router has its nodes."""
    try:
        url = f"http://127.0.0.1:{json.loads(ports.read_text())['http']}/ready"
        return requests.get(url, timeout=60).status_code == 200
    except (FileNotFoundError, requests.RequestException):  # it may also be late
        return False


def test_children_die_with_a_killed_up() -> None:
    up = start_up()
    _, pids = read_until_ready(up)
    up.kill()
    up.communicate(timeout=120)
    assert len(pids) == 3
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_death_gives_up_a_non_zero_exit_code() -> None:
    up = start_up("--restart=no")
    _, pids = read_until_ready(up)
    os.kill(pids[-1], signal.SIGKILL)
    _, rest = up.communicate(timeout=120)
    assert up.returncode == 1
    assert "ended with signal 9" in rest


def test_json_lines_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=20)
    config = ClusterConfig()
    line = json.dumps({"message": "a line longer than the console is wide", "role": "[bold]"})
    log_writer(replace(config, log=replace(config.log, log_format="json")), console)("x", line)
    assert json.loads(capsys.readouterr().out)["role"] == "[bold]"


def nodes(*sizes: int) -> list[ParallelConfig]:
    return [ParallelConfig(tensor_parallel_size=size) for size in sizes]


def test_place_deals_gpus_in_order() -> None:
    placed = share_host(EngineConfig(), nodes(2, 1), gpus=["0", "1", "2"], cores=8)
    assert [item.environment["CUDA_VISIBLE_DEVICES"] for item in placed] == ["0,1", "2"]
    assert [item.engine.parallel.tensor_parallel_size for item in placed] == [2, 1]
    assert placed[0].engine.cache.gpu_memory_utilization == 0.9


def test_every_rank_of_every_replica_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(12))))
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    engine = EngineConfig(parallel=parallel)
    prefill, decode = node_shares(ClusterConfig(engine=engine, prefill_tp=1, decode_pp=2))
    assert prefill.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "2,3,4,5,6,7,8,9"
    assert replace(prefill.engine.parallel, cpu_threads=0) == replace(
        parallel, tensor_parallel_size=1
    )
    assert replace(decode.engine.parallel, cpu_threads=0) == replace(
        parallel, pipeline_parallel_size=2
    )


def test_place_shares_one_gpu() -> None:
    placed = share_host(EngineConfig(), nodes(1, 1), gpus=["7"], cores=8)
    assert [each.engine.parallel.host_nodes for each in placed] == [1, 1]
    on_cpus = share_host(EngineConfig(), nodes(1, 1), gpus=[], cores=8)
    assert [each.engine.parallel.host_nodes for each in on_cpus] == [2, 2], "they share memory"
    assert [item.environment["CUDA_VISIBLE_DEVICES"] for item in placed] == ["7", "7"]
    assert placed[0].engine.cache.gpu_memory_utilization == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("cores", "size", "threads"),
    [(8, {"prefill_tp": 2}, 2), (2, {}, 1), (2, {"prefill": 2, "decode": 2}, 1),
     (1, {"decode_tp": 4}, 1), (4, {"both": 2}, 2), (2, {"both": 1}, 2),
     (9, {"both": 1, "prefill": 1, "decode": 2}, 2)],
)  # fmt: skip
def test_the_cores_are_divided_by_all_ranks(
    cores: int, size: dict[str, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_share, "usable_cores", lambda: cores)
    engine = EngineConfig(parallel=ParallelConfig(device="cpu"))
    placed = node_shares(ClusterConfig(engine=engine, **size))  # type: ignore[arg-type]
    assert {item.engine.parallel.cpu_threads for item in placed} == {threads}
    assert all(item.environment == {} for item in placed)


@pytest.mark.parametrize(
    ("size", "cores", "gpus", "file", "lends", "given"),
    [((1, 1), 2, [], None, True, None), ((1, 2), 2, [], None, False, None),
     ((1, 1), 2, ["0"], None, False, None), ((1, 1), 2, [], "off", False, None),
     ((1, 1), 2, [], "file", False, "file"), ((1,), 2, [], None, False, None)],
)  # fmt: skip
def test_nodes_that_have_cores_of_their_own_lend_them(
    size: tuple[int, ...],
    cores: int,
    gpus: list[str],
    file: str | None,
    lends: bool,
    given: str | None,
) -> None:
    engine = EngineConfig(parallel=ParallelConfig(share_cores=file))
    placed = share_host(engine, nodes(*size), gpus=gpus, cores=cores)
    assert [each.lends_cores for each in placed] == [lends] * len(size)
    assert [each.engine.parallel.share_cores for each in placed] == [given] * len(size)


def test_a_table_of_cores_is_there_for_other_processes_and_keeps_its_size() -> None:
    table = CoreTable(3)
    assert lent_seconds(Path(table.path)) == [0.0] * 3
    with open(table.path, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    table.close()
    assert not Path(table.path).exists()


def test_a_flag_says_how_many_threads() -> None:
    engine = EngineConfig(parallel=ParallelConfig(device="cpu", cpu_threads=3))
    shares = node_shares(ClusterConfig(engine=engine, prefill=2, both=1, decode=1))
    assert [share.engine.parallel.cpu_threads for share in shares] == [3] * 4
