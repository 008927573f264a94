"""`python -m pdserve.decode_node.both`: prefill and decode in one process, on any host."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.common.config.node import BothNodeConfig
from pdserve.common.core.host import leave
from pdserve.common.node.main import run_node

DESCRIPTION = "A node of both roles: computes prompts, in chunks, and generates tokens beside them."


def main(argv: Sequence[str] | None = None) -> int:
    node = "pdserve.decode_node.node:BothNode"
    return run_node("both", node, DESCRIPTION, argv, BothNodeConfig)


if __name__ == "__main__":
    leave(main())
