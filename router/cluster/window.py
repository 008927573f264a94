"""The context window that the router offers, where nodes hold different ones.

One node with a wrong `--max-model-len`, or with little memory, must not shorten the context of all
requests; nor may one big node get all requests that state no `max_tokens`. So nodes that hold much
less than the usual one do not count: they get the requests that fit them. All others count, and
hold every request.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.node import Node

logger = logging.getLogger(__name__)

MUCH_LESS = 0.5  # of the usual window: a node that holds less does not count
_COMPUTE = frozenset({pb.ROLE_PREFILL, pb.ROLE_BOTH})  # prompts
_ANSWER = frozenset({pb.ROLE_DECODE, pb.ROLE_BOTH})


def offered(nodes: Collection[Node]) -> int | None:
    """Returns the tokens of context, prompt and answer together, that the router offers; None: no
    node states any. The usual window is the longest one that at least half of the nodes that
    compute prompts hold, and half of those that answer."""
    told = [node for node in nodes if node.info.max_model_len]  # 0: the node does not say
    windows = [node.info.max_model_len for node in told]
    of_roles = (
        [n.info.max_model_len for n in told if n.info.role in r] for r in (_COMPUTE, _ANSWER)
    )
    usual = min((_usual(each) for each in of_roles if each), default=0)
    return min((each for each in windows if each >= MUCH_LESS * usual), default=None)


def _usual(windows: Iterable[int]) -> int:
    ordered = sorted(windows, reverse=True)
    return ordered[(len(ordered) - 1) // 2]


def holds(node: Node, num_tokens: int) -> bool:
    """Returns whether the node can hold so many tokens of one request."""
    return num_tokens <= (node.info.max_model_len or num_tokens)


def note_short(nodes: Iterable[Node], window: int | None) -> None:
    """Notes which nodes hold less than the router offers, and logs news."""
    for node in nodes:
        was = node.short
        node.short = "" if window is None or holds(node, window) else _short(node, window)
        if node.short and not was:
            logger.warning("%s: %s", node.id, node.short)


def _short(node: Node, window: int) -> str:
    return (
        f"it holds {node.info.max_model_len} tokens of context, but the router offers {window}: "
        "longer requests go to other nodes (--max-model-len)"
    )
