"""`pdserve scale ROLE=N …`: changes how many nodes a cluster of `pdserve up --on ray` has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdserve.common.core.errors import ConfigError, NodeError

ROLES = ("prefill", "decode", "both")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    import ray  # the extra `ray`
    from ray.exceptions import RayActorError

    from pdserve.cli.ray_cluster import find_desk
    from pdserve.common.distributed.ray_executor import connect

    connect(args.ray_address)
    desk = find_desk(args.served_model_name)
    try:
        refusal: str = ray.get(desk.ask.remote(args.sizes))
    except RayActorError:
        raise NodeError("the cluster has ended") from None
    if refusal:
        raise ConfigError(refusal)
    print(", ".join(f"{role}: {size}" for role, size in args.sizes.items()))
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; raises ConfigError for an invalid ROLE=N."""
    parser = argparse.ArgumentParser(
        prog="pdserve scale",
        description="Change how many nodes a cluster of `pdserve up --on ray` has. Returns when "
        "the new nodes are ready and the removed ones have drained.",
    )
    parser.add_argument(
        "sizes", nargs="+", metavar="ROLE=N", help=f"nodes of a role ({', '.join(ROLES)})"
    )
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="head of the Ray cluster")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="model of the cluster, if there are several"
    )
    args = parser.parse_args(argv)
    args.sizes = dict(map(_size, args.sizes))
    return args


def _size(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ROLES or not number.isdecimal():
        raise ConfigError(f"{text}: give ROLE=N with a role of {', '.join(ROLES)}, as decode=4")
    return role, int(number)
