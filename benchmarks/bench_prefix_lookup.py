"""Measures the CPU time that placement adds to a request on the router, the minimum of many rounds:
hashing and looking up the prompt, and the whole placement: both of these, admission's estimates,
and the choice of a decode and a prefill node.

    python benchmarks/bench_prefix_lookup.py [--nodes 16] [--json FILE]

One node has the whole prompt cached, so that all of it is hashed; `partly cached`: 70 % of it. Each
node has three prompts in flight. `sha256`: the tokens in one call of hashlib, the least that such
an index costs; `every block`: the hashes of all blocks, as nodes need them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import thread_time
from typing import Any

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.policy import Blocks
from pdserve.router.cluster.prefix_index import PrefixIndex, PromptBlocks
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.role_policy import PlacementRequest
from pdserve.simulate.outcome import table

SIZE = 16
LENGTHS = (2048, 8192, 32_768)
SMALL = 16_384  # longer prompts come as arrays from the process that parses large bodies


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=16, help="nodes per role")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = [row(length, args.nodes, args.rounds) for length in LENGTHS]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def row(length: int, num_nodes: int, rounds: int) -> dict[str, Any]:
    """Returns the microseconds for a prompt of `length` tokens."""
    ids = random.Random(0).choices(range(150_000), k=length)
    tokens = array("I", ids) if length > SMALL else ids
    buffer = array("I", ids).tobytes()
    blocks, whole, partly = PromptBlocks(tokens, SIZE), PrefixIndex(), PrefixIndex()
    hashes = list(blocks)
    whole.store("a node", hashes)
    partly.store("a node", hashes[: int(0.7 * len(hashes))])
    whole.match(blocks)
    found = {
        "tokens": length,
        "sha256": least(lambda: hashlib.sha256(buffer), rounds),
        "hash and look up": least(lambda: whole.match(PromptBlocks(tokens, SIZE)), rounds),
        "partly cached": least(lambda: partly.match(PromptBlocks(tokens, SIZE)), rounds),
        "look up": least(lambda: whole.match(blocks), rounds),
        "every block": least(lambda: hash_blocks(tokens, SIZE), rounds),
    }
    for policy in ("least-load", "prefix-aware", "cost"):
        placement = Placement(policy, num_nodes, hashes)
        found[f"place: {policy}"] = least(lambda: placement.place(tokens), rounds)  # noqa: B023
    return {
        name: value if name == "tokens" else round(1e6 * value) for name, value in found.items()
    }


class Placement:
    """Equal numbers of prefill and decode nodes with measured rates, and the policy that selects
    them."""

    def __init__(self, policy: str, num_nodes: int, hashes: Sequence[int]) -> None:
        config = RoutingConfig(prefill_policy=policy, decode_policy=policy)
        registry = Registry(config, lambda: 100.0)
        chance = random.Random(0)
        for number in range(2 * num_nodes):
            role = pb.ROLE_DECODE if number % 2 else pb.ROLE_PREFILL
            info = pb.NodeInfo(
                node_id=f"node-{number:04}", role=role, fingerprint="", block_size=SIZE
            )
            info.kv_connectors.append("tcp")
            rates = pb.Rates(prefill=chance.uniform(1e-4, 2e-4), step=0.02, sequence=1e-3)
            registry.register(info, pb.NodeLoad(healthy=True, rates=rates))
        self._index = PrefixIndex()
        self._index.store(registry.nodes()[0], hashes)
        for node in registry.nodes():
            for tokens in (500, 1000, 3000):
                InFlightLoad(registry, node, tokens).__enter__()
        policies = load_policies(config)
        self._selector = NodeSelector(config, ClusterView(registry), policies, self._match)

    def _match(self, blocks: Callable[[int], Blocks]) -> Mapping[Node, int]:
        return self._index.match(blocks(SIZE))  # type: ignore[return-value]

    def place(self, tokens: Sequence[int]) -> None:
        """Places a request as the router does, without waiting for nodes."""
        made = PromptBlocks(tokens, SIZE)
        request = PlacementRequest(
            request_id="r",
            num_tokens=len(tokens),
            longest=len(tokens) + 1,
            adapter="",
            version=None,
            avoid=(),
            local_prefill=False,
            last_chance=lambda role: False,
            waiting=nullcontext,  # type: ignore[arg-type]
            blocks=lambda size: made,
        )
        self._selector.least_missing(request)
        with suppress(StopIteration):  # no await blocks
            self._both(request).send(None)

    async def _both(self, request: PlacementRequest) -> None:
        decode, _ = await self._selector.decode(request)
        await self._selector.prefill(request, decode)


def least(work: Callable[[], object], rounds: int) -> float:
    """Returns the CPU seconds of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        began = thread_time()
        work()
        best = min(best, thread_time() - began)
    return best


if __name__ == "__main__":
    sys.exit(main())
