"""`benchmarks/peers.py`: who is started, how it ends, what the table says; a real cluster beside a
server that is none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from paths import MODELS, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import figures
import peers

from benchmarks.compared import servers, workloads
from benchmarks.compared.report import Results, table
from benchmarks.compared.servers import Absent, Machine, Server, running
from benchmarks.compared.workloads import Closed, Mixed
from pdserve.cli.main import main as pdserve

MODEL = MODELS / "llama-gqa"
SMALL = (Closed(16, 4, 2, 3), Mixed(2, 8, 12, 40, every=0.05, most=3, long_output_len=2))


@pytest.fixture
def machine() -> Machine:
    return Machine(MODEL, "float32", sorted(os.sched_getaffinity(0)))


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


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


def test_brackets_in_names_and_reasons_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--no-peers", "--quick", "--model", str(MODEL), "--logs", str(tmp_path)]
    assert peers.main([*argv, "--pdserve", "old [1]@/no [bold]where[/red]="]) == 1
    told = capsys.readouterr().out
    assert "starting pdserve old [1]" in told
    assert "/no [bold]where[/red]" in told.partition("absent: pdserve old [1]")[2]


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
        pass  # nobody_is_left looks


def test_an_engine_that_its_server_leaves_is_asked_to_end_and_what_it_shared_is_gone(
    machine: Machine, tmp_path: Path
) -> None:
    """The server ends at once; its engine gives one segment back and forgets the other."""
    told = tmp_path / "told"
    engine = f"""
import pathlib, signal, sys
from multiprocessing import resource_tracker, shared_memory
one, other = (shared_memory.SharedMemory(create=True, size=64) for _ in range(2))
resource_tracker.unregister(other._name, "shared_memory")
def end(*_):
    one.unlink()
    pathlib.Path({str(told)!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print(one.name, other.name, flush=True)
signal.pause()
"""
    script = (
        "import subprocess, sys\n"
        f"engine = subprocess.Popen([sys.executable, '-c', {engine!r}], stdout=subprocess.PIPE)\n"
        "print(engine.stdout.readline().decode(), end='', flush=True)"
    )
    server = Server("careless", lambda port: [sys.executable, "-c", script])
    log = tmp_path / "careless.log"
    with pytest.raises(Absent, match="ended with 0"), running(server, machine, tmp_path):
        pass
    names = log.read_text().split()
    assert told.exists() and len(names) == 2
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_ratios_are_of_the_first_server() -> None:
    results = Results()
    for tok_s in (10.0, 40.0, 30.0):
        results.add("8 clients", "ours", {"tok_s": tok_s, "ttft_p50": 0.5})
    results.add("8 clients", "theirs", {"tok_s": 15.0})
    text = [list(column.cells) for column in table(results).columns]
    assert text[1] == ["output, tok/s", "TTFT p50, ms"]
    assert text[2] == ["30.0", "500"]
    assert text[3] == ["15.0 (2.00 ×)", "–"]


def test_every_server_is_asked_the_same() -> None:
    """Equal prompts in every turn of a round, others in the next one: no cache knows them."""
    spec = workloads.RandomSpec(10, 4)
    first, again, next_round = (
        workloads.random_prompts(spec, 3, workloads.WORDS, seed) for seed in (0, 0, 1)
    )
    assert first == again != next_round
    assert [each.name for each in workloads.QUICK][:-1] == [each.name for each in workloads.FULL][
        :-1
    ]


@pytest.mark.parametrize(
    "argv", [["--rounds", "0"], ["--workloads", "9"], ["--pdserve", "both"], ["--dtype", "int3"]]
)
def test_what_makes_no_sense(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        peers.parse_args(argv)
    assert stop.value.code == 2


def test_the_model_as_gguf_has_the_same_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from benchmarks.compared.gguf_model import KINDS, convert

    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    numbers = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    quantized = gguf.quantize(numbers, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("x.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(source, out, KINDS["float32"])
    read = gguf.GGUFReader(out)
    matrix, norm = (tensor.data for tensor in read.tensors)
    assert (matrix == gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q4_1)).all()
    assert (norm == numbers[0]).all()
    assert read.fields["llama.block_count"].contents() == 1
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


def test_figures_go_into_the_page(tmp_path: Path) -> None:
    step, found, page = tmp_path / "step.json", tmp_path / "peers.json", tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    argv = ["bench", "step", f"--model={MODEL}", "--threads=1", "--repetitions=1", "--chunk=8"]
    assert pdserve([*argv, f"--json={step}"]) == 0
    medians = {"8 clients": {"ours": {"tok_s": 30.0}, "theirs": {"tok_s": 15.0}}}
    rounds = [{"server": name} for name in ("ours", "theirs")]
    result = {"cpu": "a CPU", "cores": [0], "dtype": "float32", "absent": {"vLLM": "why"}}
    found.write_text(json.dumps({**result, "medians": medians, "rounds": rounds}))
    for _ in range(2):  # the second time over the first one's
        assert figures.main([str(step), str(found), str(page)]) == 0
        text = page.read_text(encoding="utf-8")
        assert text.count("| prefill 8 |") == text.count("| 8 clients | tok/s | 2.00 × |") == 1
        assert text.count("Absent: vLLM (why).") == 1
    assert figures.main(["/nowhere", str(found), str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text  # what was not measured stays
