"""`python -m pdserve.prefill_node`: the prefill role alone, on any host."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.common.core.host import leave
from pdserve.common.node.main import run_node

DESCRIPTION = "A prefill node: computes prompts and hands their KV to decode nodes."


def main(argv: Sequence[str] | None = None) -> int:
    return run_node("prefill", "pdserve.prefill_node.node:PrefillNode", DESCRIPTION, argv)


if __name__ == "__main__":
    leave(main())
