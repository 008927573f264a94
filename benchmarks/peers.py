"""Compares pdserve with other servers: same model, dtype, cores, prompts and load generator.

    python benchmarks/peers.py --quick --vllm VENV --transformers VENV --llama-server FILE
    python benchmarks/peers.py --pdserve 1P+1D= --pdserve "2 chunks=--max-num-batched-tokens 256"
    python benchmarks/peers.py --pdserve now= --pdserve before@../old= --json peers.json

All servers start on free ports, pinned to the same cores, and keep running; in each round every
server gets each workload in turn. Figures are medians over rounds. If a peer is not installed, the
reason is shown. Compare only ratios within one run: machines differ, and so does their other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compared import servers
from benchmarks.compared.report import Results, plot, table
from benchmarks.compared.servers import Absent, Machine, Running, Server, running
from benchmarks.compared.workloads import FULL, QUICK, Closed, Failed, Workload, measure, warm_up
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import cpu_name
from pdserve.demo_model.embedded import ensure_embedded_model

GENERATED = Closed(128, 64, 8, 0).name  # the workload of `generate.py`
GENERATE_TIMEOUT = 300.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder (default: the embedded model)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--cores", type=_cores, help="cores of all servers, e.g. 0,1 (default: all)")
    add("--rounds", type=int, default=3)
    add("--quick", action="store_true", help="fewer requests, at most two rounds")
    add("--workloads", type=int, nargs="+", metavar="N", help="workloads to run, by number from 1")
    add(
        "--pdserve",
        action="append",
        metavar="NAME[@CHECKOUT]=FLAGS",
        help="shape of `pdserve up`, of this or another checkout; repeatable (default: 1P+1D=)",
    )
    peers = parser.add_argument_group("peers, or PEERS_VLLM, PEERS_TRANSFORMERS …").add_argument
    env = os.environ.get
    peers("--vllm", default=env("PEERS_VLLM"), metavar="VENV")
    peers("--transformers", default=env("PEERS_TRANSFORMERS"), metavar="VENV")
    peers("--llama-server", default=env("PEERS_LLAMA_SERVER"), metavar="FILE")
    peers("--gguf", default=env("PEERS_GGUF"), metavar="FILE", help="the model for llama.cpp")
    add(
        "--start-timeout",
        type=float,
        default=servers.START_TIMEOUT,
        help="seconds; some servers compile",
    )
    add("--no-peers", action="store_true", help="pdserve alone")
    add("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not all(1 <= n <= len(FULL) for n in args.workloads or ()):
        parser.error(f"--rounds begin at 1, --workloads are 1 … {len(FULL)}")
    if not all("=" in shape for shape in args.pdserve or ()):
        parser.error("--pdserve is NAME[@CHECKOUT]=FLAGS, e.g. 1P+1D=")
    return args


def _cores(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def wanted(args: argparse.Namespace, machine: Machine) -> dict[str, Callable[[], Server]]:
    """Returns name (for an absent server) → function that makes the server."""
    shapes = args.pdserve or ["1P+1D="]
    found: dict[str, Callable[[], Server]] = {
        f"pdserve {shape.partition('=')[0]}": lambda shape=shape: servers.pdserve(shape, machine)  # type: ignore[misc]
        for shape in shapes
    }
    if not args.no_peers:
        found["vLLM"] = lambda: servers.vllm(args.vllm, machine)
        found["transformers serve"] = lambda: servers.transformers(args.transformers, machine)
        found["llama.cpp"] = lambda: servers.llama_cpp(args.llama_server, args.gguf, machine)
    return found


def chosen(args: argparse.Namespace) -> Sequence[Workload]:
    every = QUICK if args.quick else FULL
    return [every[n - 1] for n in args.workloads] if args.workloads else every


def compare(
    args: argparse.Namespace,
    workloads: Sequence[Workload],
    machine: Machine,
    console: Console,
    logs: Path,
) -> Results:
    results = Results()
    with ExitStack() as stack:
        alive: list[Running] = []
        for name, make in wanted(args, machine).items():
            try:
                console.print(f"starting {name}")
                found = stack.enter_context(running(make(), machine, logs))
                asyncio.run(warm_up(workloads, found))
                alive.append(found)
            except (Absent, Failed) as error:
                results.absent[name] = str(error)
        for each in alive:
            results.idle_cpu[each.server.name] = each.idle_cpu()
        for number in range(min(args.rounds, 2) if args.quick else args.rounds):
            for workload in workloads:
                _one_turn(workload, number, alive, results, console)
                if workload.name == GENERATED and not args.no_peers:
                    _generate(args, machine, results)
    return results


def _one_turn(
    workload: Workload, number: int, alive: list[Running], results: Results, console: Console
) -> None:
    """Runs every server once; the order rotates from round to round."""
    start = number % len(alive) if alive else 0
    for each in [*alive[start:], *alive[:start]]:
        try:
            found = asyncio.run(measure(workload, each, seed=number))
            results.add(workload.name, each.server.name, found)
            console.print(
                f"round {number + 1}, {workload.name}: {each.server.name} {_short(found)}"
            )
        except Failed as error:
            results.absent[f"{each.server.name}, {workload.name}"] = str(error)


def _short(found: Any) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())


def _generate(args: argparse.Namespace, machine: Machine, results: Results) -> None:
    name = "transformers generate"
    try:
        command = servers.generate_command(args.transformers, machine)
        output = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GENERATE_TIMEOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, machine.cores),
        )
        if output.returncode:
            raise Absent(output.stderr.strip().rpartition("\n")[2])
        results.add(GENERATED, name, json.loads(output.stdout))
    except (Absent, subprocess.TimeoutExpired) as error:
        results.absent[name] = str(error)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run(args, chosen(args))


def run(args: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    """Returns exit code 1 if no server answered, 2 if the start failed."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with us
    try:
        model = args.model or ensure_embedded_model()
    except ConfigError as error:
        console.print(error.message, style="red")
        return 2
    cores = args.cores or sorted(os.sched_getaffinity(0))
    machine = Machine(model.resolve(), args.dtype, cores, args.start_timeout)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="pdserve-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    results = compare(args, workloads, machine, console, logs)
    return _report(args, machine, results, console, logs)


def _report(
    args: argparse.Namespace, machine: Machine, results: Results, console: Console, logs: Path
) -> int:
    if results.found:
        console.print(table(results))
    for name, reason in results.absent.items():
        console.print(f"absent: {name}: {reason}")
    console.print(f"logs: {logs}")
    if args.json:
        told = {"cpu": cpu_name(), "cores": list(machine.cores), "dtype": args.dtype}
        args.json.write_text(json.dumps({**told, **results.as_json()}, indent=2) + "\n")
    if args.plot and results.found:
        plot(results, args.plot)
    return 0 if results.found else 1


if __name__ == "__main__":
    sys.exit(main())
