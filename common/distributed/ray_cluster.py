"""What is asked of a Ray cluster: to be there, to have room, and to stay."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from pdserve.common.core.errors import ConfigError

_PROBE = 3.0  # seconds a connection to the cluster's head may take
_ROOM = 20.0  # seconds after which there is no room; ranks of a node that ended may linger
_BEAT = 1.0  # seconds between two looks at the head
_MISSES = 2  # looks in a row after which it is gone


def connect(address: str | None) -> None:
    """Makes this process a driver of the cluster at `address` ("host:port"; None: RAY_ADDRESS,
    or else the one that runs on this host), unless it is one.

    Raises:
        ConfigError: there is no cluster.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _probe(address)
    try:
        ray.init(
            address=address,
            job_config=JobConfig(code_search_path=[os.path.abspath(path) for path in sys.path]),
            logging_level=logging.WARNING,
            log_to_driver=False,  # ranks log to their node themselves
        )
    except ConnectionError as error:
        raise _absent(str(error)) from error


def _probe(address: str) -> None:
    """Ray itself tries for two minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE).close()
    except (OSError, ValueError) as error:
        raise _absent(f"{address}: {error}") from error


def _absent(reason: str) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster ({reason}): run `ray start --head` on one host and "
        "`ray start --address HOST:6379` on the others, and pass --ray-address HOST:6379"
    )


async def reserve(stages: int, ranks: int, unit: str) -> PlacementGroup:
    """A bundle of `ranks` units ("CPU" or "GPU") for each stage, each on one host, and on as many
    hosts as there are.

    Raises:
        ConfigError: there is no room for them.
    """
    group = placement_group([{unit: ranks}] * stages, strategy="SPREAD")
    try:
        if not await _granted(group):
            raise ConfigError(
                f"Ray has no room for {stages} x {ranks} {unit} within {_ROOM:.0f} s, each "
                f"{ranks} of a stage on one host; {_room(unit)}: add hosts, or lower "
                "--tensor-parallel-size or --pipeline-parallel-size"
            )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


async def _granted(group: PlacementGroup) -> bool:
    deadline = asyncio.get_running_loop().time() + _ROOM
    while not await asyncio.to_thread(group.wait, timeout_seconds=1):
        if asyncio.get_running_loop().time() > deadline:
            return False
    return True


def _room(unit: str) -> str:
    hosts = [
        f"{node['NodeManagerAddress']} has {node['Resources'].get(unit, 0):g}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = ray.available_resources().get(unit, 0)
    return f"{', '.join(hosts)}; free in all: {free:g}"


def hosts_of(group: PlacementGroup) -> list[str]:
    """The address of each stage's host."""
    addresses: Mapping[str, str] = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()
    }
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [addresses[nodes[stage]] for stage in sorted(nodes)]


async def give_back(group: PlacementGroup) -> None:
    """Ends what was reserved, and what runs there. A cluster without a head is not asked, which
    would take a minute; it forgets a driver that is gone."""
    if await _head_answers():
        remove_placement_group(group)


async def head_lost() -> str:
    """Returns once the cluster's head does not answer any more: it can end nothing then, and
    after a minute Ray ends everything that knew it."""
    misses = 0
    while misses < _MISSES:
        await asyncio.sleep(_BEAT)
        misses = 0 if await _head_answers() else misses + 1
    return f"lost Ray's head at {_head()}"


def _head() -> str:
    return str(ray.get_runtime_context().gcs_address)


async def _head_answers() -> bool:
    host, _, port = _head().rpartition(":")
    try:
        async with asyncio.timeout(_PROBE):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
