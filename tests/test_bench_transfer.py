"""`benchmarks/bench_transfer.py`: connectors and transfer libraries in the same rounds; libraries
that are not there, or do not move what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.bench_transfer import throughput
from benchmarks.compared.movers import Peers
from benchmarks.transfer_ends import Shape
from benchmarks.transfer_tables import show

ENGINE = """
import os

class TransferEngine:
    def initialize(self, *args): return 0
    def get_rpc_port(self): return os.getpid()
    def register_memory(self, address, nbytes): return 0
    def batch_transfer_sync_write(self, peer, data, places, lengths):
        near = open("/proc/self/mem", "rb", 0)
        with near, open(f"/proc/{peer[10:]}/mem", "wb", 0) as far:
            for source, place, nbytes in zip(data, places, lengths):
                os.pwrite(far.fileno(), os.pread(near.fileno(), nbytes, source), place)
        return 0
"""
SMALL = Shape("small", 2, 1, 16, "float32", 4, num_blocks=16)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python that has an engine as Mooncake's, and an NIXL that cannot be imported."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(ENGINE)
    (tmp_path / "nixl.py").write_text("raise ImportError('no libucp.so')\n")
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def peers(python: str) -> Peers:
    return Peers(["nixl", "mooncake"], python)


@pytest.mark.slow
def test_peers_take_turns_with_connectors(peers: Peers, capsys: pytest.CaptureFixture[str]) -> None:
    moved = throughput(["shm"], peers, SMALL, 0.0)
    assert [each.connector for each in moved] == ["shm", "mooncake"]
    assert all(each.gb_per_s > 0 for each in moved)
    assert moved[0].with_digests and moved[1].with_digests is None
    assert peers.absent == {"nixl": "ImportError: no libucp.so"}
    show(moved, [], peers.versions, peers.absent)
    assert "nixl is absent: ImportError: no libucp.so" in capsys.readouterr().out


@pytest.mark.slow
def test_a_peer_s_moved_blocks_are_checked(python: str) -> None:
    engine = Path(python).parent / "mooncake" / "engine.py"
    engine.write_text(ENGINE.replace("os.pwrite(", "print("))
    peers = Peers(["mooncake"], python)
    assert throughput([], peers, SMALL, 0.0) == []
    assert peers.absent == {"mooncake": "RuntimeError: the blocks differ after the transfer"}
