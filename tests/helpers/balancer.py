"""HAProxy before the routers of a cluster, by the configuration in `compose/`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy

import pytest

from benchmarks.fleet import free_port
from cluster import ended
from paths import ROOT
from warm import WarmCluster

CONFIG = ROOT / "compose/haproxy.cfg"
DOORS = {"8000": "http", "8001": "grpc"}  # port in the configuration → the router's port
TEMPLATE = re.compile(r"server-template (\S+) \d+ router:(\d+)(.*)")


@contextmanager
def balanced(cluster: WarmCluster) -> Iterator[WarmCluster]:
    """Yields the cluster behind HAProxy; skips the test if HAProxy is not installed."""
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    ports = {**cluster.ports, "http": free_port(), "grpc": free_port()}
    file = cluster.home.path / "haproxy.cfg"
    file.write_text(config([*cluster.routers.values()], ports))
    process = cluster.home.start([program, "-db", "-f", str(file)], cluster.log_path)
    behind = copy(cluster)
    behind.ports, behind.routers = ports, {"router": ports}
    try:
        cluster.wait_for(lambda: behind.get("/ready").ok)
        yield behind
    finally:
        process.terminate()
        ended(process)


def config(routers: Sequence[Mapping[str, int]], ports: Mapping[str, int]) -> str:
    """Returns the configuration in `compose/`, with these routers' ports and HAProxy's own."""

    def servers(found: re.Match[str]) -> str:
        prefix, door, rest = found.groups()
        return "\n    ".join(
            f"server {prefix}{number} 127.0.0.1:{each[DOORS[door]]}"
            + rest.replace("check port 8000", f"check port {each['http']}")
            for number, each in enumerate(routers)
        )

    text = TEMPLATE.sub(servers, CONFIG.read_text())
    for port, door in DOORS.items():
        text = text.replace(f"bind :{port}", f"bind 127.0.0.1:{ports[door]}")
    return text
