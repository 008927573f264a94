"""`benchmarks/peers.py`: who is started, how it ends, what the table says; a real cluster beside a
server that is none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paths import MODELS, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import peers

from benchmarks.compared import servers
from benchmarks.compared.servers import Absent, Machine, Server, running
from benchmarks.compared.workloads import Closed, Mixed
from processes import descendants

MODEL = MODELS / "llama-gqa"
SMALL = (Closed(16, 4, 2, 3), Mixed(2, 8, 12, 40, every=0.05, most=3, long_output_len=2))


@pytest.fixture
def machine() -> Machine:
    return Machine(MODEL, "float32", sorted(os.sched_getaffinity(0)))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = descendants()
    yield
    assert descendants() <= before


@pytest.mark.slow
def test_a_cluster_is_measured_and_who_is_absent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "QUICK", SMALL)
    result, picture = tmp_path / "r.json", tmp_path / "r.png"
    argv = [
        *("--quick", "--rounds", "1", "--model", str(MODEL), "--dtype", "float32"),
        *("--pdserve", "1P+1D=--cpu-threads 1 --num-gpu-blocks-override 192"),
        *("--pdserve", "elsewhere@/nowhere="),
        *("--vllm", str(tmp_path), "--logs", str(tmp_path / "logs")),
        *("--json", str(result), "--plot", str(picture)),
    ]
    assert peers.main(argv) == 0
    found = json.loads(result.read_text())
    for workload in SMALL:
        metrics = found["medians"][workload.name]["pdserve 1P+1D"]
        assert metrics["tok_s"] > 0 and metrics["itl_p99"] >= metrics["itl_p50"] > 0
        assert metrics["output_tokens"] == workload.output_len
    assert found["medians"][SMALL[1].name]["pdserve 1P+1D"]["long_ttft_p50"] > 0
    assert "no checkout" in found["absent"]["pdserve elsewhere@/nowhere"]
    assert "there is no" in found["absent"]["vLLM"]
    assert "--transformers" in found["absent"]["transformers serve"]
    assert "--llama-server" in found["absent"]["llama.cpp"]
    assert found["idle_cpu"].keys() == {"pdserve 1P+1D"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "absent: vLLM" in capsys.readouterr().out


def test_a_server_that_ends_at_once_is_absent(machine: Machine, tmp_path: Path) -> None:
    server = Server("broken", lambda port: [sys.executable, "-c", "raise SystemExit('why')"])
    with pytest.raises(Absent, match="ended with 1"), running(server, machine, tmp_path):
        pass
    assert "why" in (tmp_path / "broken.log").read_text()


def test_a_server_that_does_not_end_is_killed_with_its_children(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT", 0.2)
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); time.sleep(99)"
    )
    server = Server("deaf", lambda port: [sys.executable, "-c", script])
    soon = replace(machine, start_timeout=2.0)
    with pytest.raises(Absent, match="is late"), running(server, soon, tmp_path):
        pass  # no_process_is_left looks
