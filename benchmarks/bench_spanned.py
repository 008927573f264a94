"""Measures how much longer a step takes when a node's tensor-parallel ranks are on two hosts, and
prints it beside the prediction in the node's log. Hosts are network namespaces of this machine.
Linux, root only. Ranks of one host use gloo too: on a busy machine, waiting in shared memory would
take longer than the link.

    python benchmarks/bench_spanned.py tests/models/llama-gqa [--rate 100mbit] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import hosts
from benchmarks.fleet import Fleet
from benchmarks.warm_start import WarmStart

KEY = "of-this-benchmark"
ANSWERS, TOKENS = 8, 100
TIMEOUT = 60.0  # seconds, also of the ranks
ADDED = re.compile(r"takes (\S+) ms and carries (\S+) MB/s, .* about (\S+) ms to a step of one")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rate", help="rate of each host's link, in tc's notation (default: unlimited)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    if why := hosts.unavailable():
        parser.error(why)
    warm = WarmStart()  # before this thread leaves the host's network
    with hosts.network() as network:
        for _ in range(options.rounds):
            together, _ = measured(network, warm, options, 1)
            apart, said = measured(network, warm, options, 2)
            latency, bandwidth, predicted = map(float, ADDED.search(said or "").groups())  # type: ignore[union-attr]
            row = {
                "latency_ms": latency,
                "bandwidth_mb_per_s": bandwidth,
                "predicted_ms": predicted,
                "measured_ms": round(apart - together, 3),
                "step_on_one_host_ms": round(together, 3),
            }
            print(json.dumps(row), flush=True)
    warm.close()
    return 0


def measured(
    network: hosts.Network, warm: WarmStart, options: argparse.Namespace, count: int
) -> tuple[float, str]:
    """Returns the milliseconds of a one-token decode step with the ranks on `hosts` hosts, and the
    log. The fastest of several answers counts, since other load only makes answers slower."""
    places = [network.add() for _ in range(count)]
    for address, _ in places:
        if options.rate and not network.slow(address, options.rate):
            raise SystemExit("the kernel has no token bucket filter")
    address, enter = places[0]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        flags = {"model": options.model.resolve(), "cpu_threads": 1, "dtype": "float32"}
        router = {"host": "0.0.0.0", "cluster_key": KEY}
        fleet = Fleet(flags["model"], log, dict(os.environ), router, warm)
        fleet.start_router(network.enter_router)
        pids = [str(network.pid(each)) for each, _ in places]
        over = ("benchmarks.apart:over", address, str(TIMEOUT), "0", *pids)
        fleet.start_node(
            "both",
            (*enter, *over),
            host=address,
            router=fleet.registries(hosts.ROUTER),
            cluster_key=KEY,
            tensor_parallel_size=options.ranks,
            device_communicator="gloo",
            distributed_timeout=TIMEOUT,
            num_gpu_blocks_override=192,
            **flags,
        )
        try:
            fleet.wait_ready()
            steps = [ask(fleet.ports["http"]) for _ in range(ANSWERS)]
            return 1e3 * min(steps), log.read_text()
        finally:
            fleet.stop()


def ask(port: int) -> float:
    """Returns the mean seconds per step of one answer."""
    body = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = {"content-type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=TIMEOUT) as answer:
        times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    return (times[-1] - times[0]) / (TOKENS - 1)


if __name__ == "__main__":
    raise SystemExit(main())
