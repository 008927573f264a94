"""Measures what placement by cached prefixes adds to a request on the router: hashing its prompt,
looking it up in the index, and the policy's choice. CPU time, the least of many rounds.

    python benchmarks/bench_prefix_lookup.py [--nodes 16] [--json FILE]

The prompt is cached as a whole on one node, so that all of it is hashed. `hashlib`: without the
library that is built at start (`common/core/block_hash.py`); `keyed`: hashlib with the parent as a
key, as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

from pdserve.common.core.block_hash import HASHER, BlockHasher
from pdserve.router.cluster.policies import BUILT_IN
from pdserve.router.cluster.policy import PolicyRequest
from pdserve.router.cluster.prefix_index import PrefixIndex, PromptBlocks
from pdserve.router.kit.nodes import PlainNode, PlainNodes
from pdserve.simulate.outcome import table

SIZE = 16
LENGTHS = (2048, 8192, 32_768)
SMALL = 16_384  # prompts of more come from a process that reads large bodies, as arrays


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    HASHER.load()
    rows = [row(length, args.nodes, args.rounds) for length in LENGTHS]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def row(length: int, num_nodes: int, rounds: int) -> dict[str, Any]:
    """Returns microseconds for a prompt of so many tokens."""
    ids = random.Random(0).choices(range(150_000), k=length)
    tokens = array("I", ids) if length > SMALL else ids
    buffer, width = array("I", ids).tobytes(), 4 * SIZE
    nodes = [PlainNode(f"node-{number:02}") for number in range(num_nodes)]
    index, blocks = PrefixIndex(), PromptBlocks(tokens, SIZE)
    index.store(nodes[0], [blocks[at] for at in range(len(blocks))])
    found = {
        "tokens": length,
        "keyed": least(lambda: keyed(buffer, width), rounds),
        "hashlib": least(lambda: BlockHasher().chain(buffer, width, b""), rounds),
        "native": least(lambda: HASHER.chain(buffer, width, b""), rounds),
        "hash and look up": least(lambda: index.match(PromptBlocks(tokens, SIZE)), rounds),
        "look up": least(lambda: index.match(blocks), rounds),
    }
    request = PolicyRequest("prefill", length, 0.0, lambda: {nodes[0]: length - 1})
    pool = PlainNodes(nodes)
    for name in ("prefix-aware", "cost"):
        policy = BUILT_IN[name]()
        found[name] = least(lambda: policy.choose(request, pool), rounds)  # noqa: B023
    return {
        name: value if name == "tokens" else round(1e6 * value) for name, value in found.items()
    }


def keyed(buffer: bytes, width: int) -> None:
    parent = b""
    for start in range(0, len(buffer), width):
        block = buffer[start : start + width]
        parent = hashlib.blake2b(block, key=parent, digest_size=16).digest()


def least(work: Callable[[], object], rounds: int) -> float:
    """Returns the CPU seconds of the quickest round."""
    best = float("inf")
    for _ in range(rounds):
        began = thread_time()
        work()
        best = min(best, thread_time() - began)
    return best


if __name__ == "__main__":
    sys.exit(main())
