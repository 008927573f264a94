"""A rank as a Ray actor. Each host runs the code it has installed: Ray carries plain bytes only.

Ray starts the process, gives it its GPU and ends it; what the node has to say to the rank goes
over a connection of its own (`wire.py`), and so does what the rank logs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from common.distributed.executor import WorkerSpec
from common.distributed.rank_main import run_rank
from common.distributed.wire import NodeAddress


class RayRank:
    """`run` is called once and returns when the rank has ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)

    def run(self, spec: bytes, node: bytes) -> int:
        """Both are msgpack: a `WorkerSpec`, a `NodeAddress`."""
        return run_rank(
            msgspec.msgpack.decode(spec, type=WorkerSpec),
            msgspec.msgpack.decode(node, type=NodeAddress),
        )
