"""The first start of a cluster, on an empty cache: no process is silent for long."""

from __future__ import annotations

import re
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from paths import MODELS
from pdserve.cli.cluster import Cluster
from pdserve.cli.host_share import node_shares
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig
from pdserve.common.config.router import ServerConfig
from pdserve.common.core import waits

EVERY = 0.25  # seconds between lines here, in place of 10
PATIENCE = 5.0  # a machine may stop a process for a while
MODULES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}
HASTY = f"""
import sys
from runpy import run_module
from pdserve.common.core import waits
waits.EVERY, waits.SOON = {EVERY}, 0.05
run_module("pdserve." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
PROGRAMS = {role: (sys.executable, "-c", HASTY, name) for role, name in MODULES.items()}


@pytest.mark.slow
async def test_a_first_start_speaks_while_a_slow_compiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler sleeps and then fails, after which nodes take torch's kernels."""
    compiler = tmp_path / "slow-g++"
    compiler.write_text("#!/bin/sh\nsleep 2\necho 'error: out of patience' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(waits, "EVERY", EVERY)
    engine = EngineConfig(
        model=ModelConfig(model=str(MODELS / "llama-gqa")),
        cache=CacheConfig(kv_cache_memory="4MiB"),
    )
    server = ServerConfig(port=0, grpc_port=0, registry_port=0)
    config = ClusterConfig(server=server, engine=engine)
    said: list[tuple[float, str, str]] = [(time.monotonic(), "", "")]

    def write(name: str, line: str) -> None:
        said.append((time.monotonic(), name, line))

    cluster = Cluster(config, node_shares(config), write, PROGRAMS)
    try:
        assert await cluster.start()
        said.append((time.monotonic(), "", ""))
    finally:
        await cluster.stop()
    text = "\n".join(f"{name}: {line}" for _, name, line in said)
    nodes = "(prefill|decode)-0: .*"
    assert re.search(nodes + r"compiling kernels for this machine, once \(0 of \d+ files\)", text)
    assert text.count("compiling kernels for this machine") > 4
    assert re.search(nodes + "waiting for another process that compiles kernels, 0 s so far", text)
    assert re.search(nodes + "using torch kernels, which are slower: .*out of patience", text)
    assert re.search(r"up: waiting for nodes \(.+\), \d+ s so far", text)
    assert max(after - before for (before, *_), (after, *_) in pairwise(said)) < PATIENCE, text
