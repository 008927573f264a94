"""Measures the router alone, with simulated nodes over real gRPC: tokens, and a large fleet.

    python benchmarks/bench_router.py [--workers 1,2] [--nodes 1000] [--seconds 8] [--json FILE]
    python benchmarks/bench_router.py --against PATH [--rounds 4] [--workers ""] [--nodes 0]
    python benchmarks/bench_router.py --policies least-load,cost [--workers ""] [--nodes 0]
    python benchmarks/bench_router.py --peers-python PATH [--plot FILE] [--workers ""] [--nodes 0]

`tokens`: closed-loop clients that stream, 8 + 8 nodes, `--router-workers` 1, 2 … Tokens per second
are those of this host, which clients and simulated nodes share. CPU time per token is the router's
alone (all its processes); from it follows the rate of a worker with a core of its own.

`against`: CPU time per request of this router and of another checkout's under the same load, in
turns, each with its own nodes. `events a token` shows whether clients on a busy host got several
tokens in one event, which costs the router less.

`peers`: the same load on smg and vllm-router, if that Python's environment has them (`pip install
smg vllm-router`, outside this repository), in turns with this router, and on the servers without a
router. These two forward each HTTP request to one simulated OpenAI server (`simulated_servers.py`).
This router has prompts computed on one node and tokens on another, and tokenizes and detokenizes.
All simulated nodes and servers answer immediately, so TTFT is the latency that a router adds.

`fleet`: N idle nodes, half of each role, registered at one worker: seconds until all are
registered, the router's share of a core, the latency of `/ready` over HTTP, and of placement in a
process with N nodes. The share for heartbeats alone is measured with `--heartbeat-timeout 600`,
which makes probes rare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_cpu_per_token import TICK_US, Load, ticks  # noqa: E402
from benchmarks.compared import routers  # noqa: E402
from benchmarks.fleet import flags  # noqa: E402
from benchmarks.live import wait_for  # noqa: E402
from benchmarks.router_tables import report  # noqa: E402
from benchmarks.simulated_nodes import info, load  # noqa: E402
from pdserve.common.config.router import RoutingConfig  # noqa: E402
from pdserve.common.obs.process import read_ports  # noqa: E402
from pdserve.common.rpc.pb import cluster_pb2 as pb  # noqa: E402
from pdserve.router.cluster.cluster_view import ClusterView  # noqa: E402
from pdserve.router.cluster.placement import NodeSelector, load_policies  # noqa: E402
from pdserve.router.cluster.prefix_index import PromptBlocks  # noqa: E402
from pdserve.router.cluster.registry import Registry  # noqa: E402
from pdserve.router.cluster.role_policy import PlacementRequest  # noqa: E402

MODEL = ROOT / "tests/models/llama-gqa"
WARM_UP = 2.0  # seconds
STAGGER = 1.3  # seconds, about the duration of a request
MAX_TOKENS = 128
PLACEMENTS = 2000
RARE_PROBES = {"heartbeat_timeout": 600}


# ---- processes ----


@contextmanager
def router(
    code: Path = ROOT, **options: Any
) -> Iterator[tuple[dict[str, int], list[psutil.Process]]]:
    """Runs a router of the checkout `code`; yields its ports and serving processes."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        ports_file = Path(folder) / "ports.json"
        free = {"port": 0, "grpc_port": 0, "registry_port": 0, "ports_file": ports_file}
        quiet = {"log_level": "error", "max_client_share": 1, "max_concurrent_requests": 4096}
        command = [sys.executable, "-m", "pdserve.router", "--model", str(MODEL)]
        with _running([*command, *flags({**free, **quiet, **options})], code) as process:
            ports = wait_for(lambda: read_ports(ports_file))
            several = options.get("router_workers", 1) > 1
            # A single process may have a child too, which warms up and ends.
            yield ports, process.children() if several else [process]


@contextmanager
def nodes(registry_port: int, prefill: int, decode: int) -> Iterator[psutil.Process]:
    command = [sys.executable, str(ROOT / "benchmarks/simulated_nodes.py")]
    options = {"router": f"127.0.0.1:{registry_port}", "model": MODEL.name}
    with _running([*command, *flags({**options, "prefill": prefill, "decode": decode})]) as process:
        yield process


@contextmanager
def _running(command: Sequence[str], code: Path = ROOT) -> Iterator[psutil.Process]:
    started = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(code)})
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(60)


def cpu_us(processes: Sequence[psutil.Process]) -> float:
    return sum(ticks(each.pid)[""] * TICK_US for each in processes)


def num_ready(port: int) -> int:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    ready = (line for line in lines if line.startswith("pdserve_nodes{") and "ready" in line)
    return sum(int(float(line.rpartition(" ")[2])) for line in ready)


# ---- tokens ----


def tokens(workers: int, clients: int, seconds: float) -> dict[str, Any]:
    with _cluster(router_workers=workers) as (port, serving):
        return asyncio.run(_under_load(port, serving, clients, seconds))


def against(code: Path, rounds: int, *shape: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns the rounds of both checkouts, which take turns."""
    with _cluster(code) as before, _cluster() as after:
        return _in_turns({"before": before, "after": after}, rounds, *shape)


def policies(names: Sequence[str], rounds: int, *shape: Any) -> dict[str, list[dict[str, Any]]]:
    """The rounds of routers that differ in how they place requests."""
    with ExitStack() as stack:
        all_ = {
            name: stack.enter_context(_cluster(prefill_policy=name, decode_policy=name))
            for name in names
        }
        return _in_turns(all_, rounds, *shape)


def peers(python: Path, rounds: int, *shape: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns the rounds of this router, of other routers, and without a router."""
    with ExitStack() as stack:
        name = MODEL.name
        ports = stack.enter_context(routers.servers(name))
        all_: dict[str, Any] = {
            "no router": (ports[0], []),
            "pdserve": stack.enter_context(_cluster()),
        }
        for each in routers.COMMANDS:
            if version := routers.version(python, each):
                started = routers.router(python, each, name, ports)
                all_[f"{each} {version}"] = stack.enter_context(started)
            else:
                print(f"{each} is not installed there", file=sys.stderr)
        return _in_turns(all_, rounds, *shape)


def _in_turns(
    clusters: dict[str, tuple[int, list[psutil.Process]]], rounds: int, *shape: Any
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in clusters}
    for _ in range(rounds):
        for name, cluster in clusters.items():
            found[name].append(asyncio.run(_under_load(*cluster, *shape)))
    return found


@contextmanager
def _cluster(code: Path = ROOT, **options: Any) -> Iterator[tuple[int, list[psutil.Process]]]:
    """Runs a router with 8 + 8 nodes; yields its HTTP port and serving processes."""
    with ExitStack() as stack:
        ports, serving = stack.enter_context(router(code, **options))
        stack.enter_context(nodes(ports["registry"], 8, 8))
        wait_for(lambda: num_ready(ports["http"]) == 16)
        yield ports["http"], serving


async def _under_load(
    port: int, serving: Sequence[psutil.Process], clients: int, seconds: float
) -> dict[str, Any]:
    asked = Load(port, MODEL.name, MAX_TOKENS)
    tasks = []
    for _ in range(clients):  # one after the other, so that their requests stay out of step
        tasks.append(asyncio.create_task(asked.client()))
        await _pass(STAGGER / clients, tasks)
    try:
        await _pass(WARM_UP, tasks)
        events, requests, firsts = asked.events, asked.requests, len(asked.first_ms)
        began, used = time.monotonic(), [cpu_us([p]) for p in serving]
        await _pass(seconds, tasks)
        while asked.requests < requests + clients:  # waits longer on a busy host
            await _pass(seconds, tasks)
        wall, events = time.monotonic() - began, asked.events - events
        used = [cpu_us([p]) - before for p, before in zip(serving, used, strict=True)]
        count = (asked.requests - requests) * MAX_TOKENS
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    us_per_token = sum(used) / count
    return {
        "workers": len(serving),
        "ms_per_request": us_per_token * MAX_TOKENS / 1e3,
        "events_per_token": events / count,
        "requests_per_s": count / MAX_TOKENS / wall,
        "first_token_ms": statistics.median(asked.first_ms[firsts:]),
        "tokens_per_s": count / wall,
        "cores": sum(used) / 1e6 / wall,
        "us_per_token": us_per_token,
        "tokens_per_s_of_so_many_cores": len(serving) * 1e6 / us_per_token if serving else 0.0,
        "least_share_of_a_worker": min(used) / sum(used) if serving else 0.0,
    }


async def _pass(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Sleeps; raises the error of a client that fails meanwhile."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


# ---- a fleet ----


def fleet(count: int, seconds: float, **options: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        ports, serving = stack.enter_context(router(**options))
        began = time.monotonic()
        stack.enter_context(nodes(ports["registry"], count // 2, count - count // 2))
        wait_for(lambda: num_ready(ports["http"]) == count)
        registered = time.monotonic() - began
        time.sleep(WARM_UP)
        began, used = time.monotonic(), cpu_us(serving)
        time.sleep(seconds)
        idle = (cpu_us(serving) - used) / 1e6 / (time.monotonic() - began)
        return {
            "nodes": count,
            "seconds_to_register": registered,
            "cores": idle,
            "ready_ms": times(lambda: urlopen(f"http://127.0.0.1:{ports['http']}/ready"), 500),
        }


def placement(count: int) -> dict[str, Any]:
    """Times requests one after the other in this process, with `count` nodes, in CPU time, which
    other programs do not lengthen."""
    registry = Registry(RoutingConfig())
    for number in range(count):
        role = pb.ROLE_DECODE if number % 2 else pb.ROLE_PREFILL
        registry.register(info(role, f"127.0.0.1:{number + 1}", MODEL.name), load(""))
    view = ClusterView(registry)
    selector = NodeSelector(RoutingConfig(), view, load_policies(RoutingConfig()))
    request = PlacementRequest(
        request_id="r", num_tokens=9, longest=10, adapter="", version=None, avoid=(),
        local_prefill=False, last_chance=lambda role: False,
        waiting=lambda what: nullcontext(0.0), blocks=lambda size: PromptBlocks((), size),
    )  # fmt: skip

    async def place() -> None:  # never blocks
        decode, _ = await selector.decode(request)
        await selector.prefill(request, decode)

    def placed() -> None:
        with suppress(StopIteration):
            place().send(None)

    cpu = time.thread_time
    return {
        "nodes": count,
        "placement_ms": times(placed, PLACEMENTS, cpu),
        "ready_ms": times(view.ready, PLACEMENTS, cpu),
    }


def times(
    call: Callable[[], object], count: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    found = []
    for _ in range(count):
        began = clock()
        call()
        found.append(1e3 * (clock() - began))
    found.sort()
    return {"p50": found[count // 2], "p99": found[count * 99 // 100], "most": found[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=1000, help="nodes of the fleet; 0: skip it")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per measurement")
    parser.add_argument("--against", type=Path, help="another checkout, to compare with its router")
    parser.add_argument("--policies", help="placement policies to compare: NAME,NAME")
    parser.add_argument("--peers-python", type=Path, help="a Python that has smg and vllm-router")
    parser.add_argument("--plot", type=Path, help="of --peers-python")
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds of --against, --policies, --peers-python"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"host_cores": os.cpu_count()}
    result |= {"clients": args.clients, "max_tokens": MAX_TOKENS}
    shape = args.clients, args.seconds
    if args.against is not None:
        result["against"] = against(args.against.resolve(), args.rounds, *shape)
    if args.policies:
        result["policies"] = policies(args.policies.split(","), args.rounds, *shape)
    if args.peers_python is not None:
        result["peers"] = peers(args.peers_python.absolute(), args.rounds, *shape)
        if args.plot:
            routers.plot(result["peers"], args.plot)
    result["tokens"] = [tokens(int(each), *shape) for each in args.workers.split(",") if each]
    if args.nodes:
        result["fleet"] = fleet(args.nodes, args.seconds)
        result["heartbeats"] = fleet(args.nodes, args.seconds, **RARE_PROBES)
        result["in_process"] = placement(args.nodes)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
