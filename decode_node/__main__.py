"""`python -m pdserve.decode_node`: the decode role alone, on any host."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.common.core.host import leave
from pdserve.common.node.main import run_node

DESCRIPTION = "A decode node: takes KV from prefill nodes and generates tokens."


def main(argv: Sequence[str] | None = None) -> int:
    return run_node("decode", "pdserve.decode_node.node:DecodeNode", DESCRIPTION, argv)


if __name__ == "__main__":
    leave(main())
