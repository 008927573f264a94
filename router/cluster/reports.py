"""The numbers that nodes report of other routers' requests, which every router adds up.

A confused node must not throttle the routers of all others. So a report whose numbers contradict
each other counts for nothing and is named, and no node adds much more than those of its role.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.node import Node

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 2**16  # of a replica, running and waiting
MAX_CONTEXT = 2**24  # tokens, of a node that does not say how many it holds
MAX_ROUTERS = 64  # of one cluster
MOST = 8  # times the median of its role that a replica may add
# What it may add in any case, while others of its role are idle.
MIN_CHOICES, MIN_TOKENS = 32, 2**15


def note_impossible(node: Node) -> None:
    """Notes what is wrong with the numbers of the node's last report, and logs news."""
    was, node.impossible = node.impossible, _impossible(node.info, node.load)
    if node.impossible and not was:
        logger.warning("%s: %s", node.id, node.impossible)


def _impossible(info: pb.NodeInfo, load: pb.NodeLoad) -> str:
    sequences = load.running + load.waiting
    most = MAX_SEQUENCES * (info.data_parallel_size or 1)
    context = min(info.max_model_len or MAX_CONTEXT, MAX_CONTEXT)
    faults = (
        (sequences > most, f"{sequences} sequences, more than {most}"),
        (load.others > sequences, f"{load.others} of {sequences} sequences are other routers'"),
        (
            load.others_tokens > load.others * context,
            f"{load.others} sequences lack {load.others_tokens} tokens",
        ),
        (load.routers > MAX_ROUTERS, f"{load.routers} routers, more than {MAX_ROUTERS}"),
    )
    found = [text for wrong, text in faults if wrong]
    return f"it reports impossible numbers, which do not count: {'; '.join(found)}" if found else ""


def routers(nodes: Iterable[Node]) -> int:
    """Returns the number of routers by the median report."""
    told = sorted(node.load.routers for node in nodes if not node.impossible)
    return max(1, _median(told))


def choices(nodes: Iterable[Node]) -> int:
    """Returns the choices that other routers have placed on these nodes."""
    return _sum(nodes, lambda node: node.load.others, MIN_CHOICES)


def tokens(nodes: Iterable[Node]) -> int:
    """Returns the prompt tokens that these nodes still have to compute for other routers."""
    return _sum(nodes, lambda node: node.load.others_tokens, MIN_TOKENS)


def _sum(nodes: Iterable[Node], value: Callable[[Node], int], least: int) -> int:
    roles: defaultdict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        if not node.impossible:
            roles[node.info.role].append(node)
    total = 0
    for alike in roles.values():
        usual = _median(sorted(-(-value(node) // node.replicas) for node in alike))
        most = max(MOST * usual, least)
        total += sum(min(value(node), most * node.replicas) for node in alike)
    return total


def _median(ordered: list[int]) -> int:
    """Returns the lower median: of two nodes, one cannot raise it."""
    return ordered[(len(ordered) - 1) // 2] if ordered else 0
