"""Measures how long prompts slow down streams that decode at the same time.

    python benchmarks/bench_interference.py --vllm VENV --json interference.json
    python benchmarks/bench_interference.py --no-peers --long-len 500 1500 --every 4 --rounds 5

Some streams decode all the time, and every few seconds a long prompt arrives. pdserve in two
processes (1P+1D), in one (`--both 1`) and other servers get the same cores and prompts, in turns.
Figures are medians of the rounds: of the streams their output and the time between tokens (ITL), of
the long prompts the time to their first token. All flags but those of the load are those of
`peers.py`, which starts and asks the servers; --pdserve names other shapes to compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers
from benchmarks.compared.workloads import Mixed

SHAPES = ["1P+1D=", "in one=--both 1"]


def parse_args(argv: Sequence[str] | None = None) -> tuple[list[Mixed], argparse.Namespace]:
    """The loads, and the options of `peers.py`."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="All other flags: peers.py --help.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--streams", type=int, default=4, metavar="N")
    add("--input-len", type=int, default=64, metavar="TOKENS", help="of a stream's prompt")
    add("--output-len", type=int, default=400, metavar="TOKENS", help="of a stream")
    add("--long-len", type=int, nargs="+", default=[1500], metavar="TOKENS")
    add("--long-prompts", type=int, default=10, metavar="N", help="at most")
    add("--every", type=float, default=2.0, metavar="SECONDS", help="between two of them")
    load, rest = parser.parse_known_args(argv)
    counts = (load.streams, load.input_len, load.output_len, load.long_prompts, *load.long_len)
    if min(counts) < 1 or load.every <= 0:
        parser.error("counts and lengths begin at 1, --every is more than 0 seconds")
    servers = peers.parse_args(rest)
    servers.pdserve = servers.pdserve or SHAPES
    return [
        Mixed(
            *(load.streams, load.input_len, load.output_len),
            *(length, load.every, load.long_prompts),
        )
        for length in load.long_len
    ], servers


def main(argv: Sequence[str] | None = None) -> int:
    workloads, servers = parse_args(argv)
    return peers.run(servers, workloads)


if __name__ == "__main__":
    sys.exit(main())
