"""`pdserve bench step` on tiny models: what is measured, what the table says, what is refused.
Times are not checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT
from pdserve.bench import main as bench_main
from pdserve.bench import parts, ranks
from pdserve.bench.step import Cell, engine_config
from pdserve.cli.main import main
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.core import waits
from windowed import make_windowed

MODELS = ROOT / "tests" / "models"
FAST = ["--threads=1", "--repetitions=2"]


def run(name: str, *options: str) -> int:
    return main(["bench", "step", f"--model={MODELS / name}", *FAST, *options])


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "qwen2-moe"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_table_and_a_result(
    name: str, kernels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    cells = ("--batch=2,3", "--context=40", "--chunk=33")
    assert run(name, *cells, f"--cpu-kernels={kernels}", f"--json={file}") == 0
    text, result = capsys.readouterr().out, json.loads(file.read_text())
    names = ["decode 2 × 40", "decode 3 × 40", "prefill 33"]
    assert list(result["cells"]) == names
    assert all(each in text for each in names)
    for cell in result["cells"].values():
        expected = set(parts.ORDER) - {"experts"}
        if name == "qwen2-moe":  # whose MLPs are experts, all of them
            expected = (expected | {"experts"}) - {"gate_up_proj", "down_proj"}
        assert expected <= set(cell["parts"])
        assert all(row["ms"] >= 0 for row in cell["parts"].values())
        assert cell["step"]["floor_ms"] > 0
        assert cell["step"]["bound_by"] in ("memory", "compute")


def test_bench_step_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first line comes before torch is imported, and none is more than 10 s away."""
    assert waits.EVERY <= 10
    assert run("llama-gqa", "--batch=2", "--context=40") == 0
    lines = capsys.readouterr().err.splitlines()
    told = [
        line.partition("step: ")[2] for line in lines if line.startswith("pdserve bench step: ")
    ]
    assert told[0] == "importing torch"
    assert told[-3:] == [
        "warming up decode 2 × 40",
        *(f"repetition {n} of 2: the machine's peaks and all steps" for n in (1, 2)),
    ]


def test_bench_step_begins_without_torch() -> None:
    code = "import sys, pdserve.bench.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kv_of_eight_bits(tmp_path: Path) -> None:
    files = [tmp_path / f"{kind}.json" for kind in ("auto", "int8")]
    for file in files:
        options = (f"--kv-cache-dtype={file.stem}", f"--json={file}", "--dtype=float32")
        assert run("llama-gqa", "--batch=1", "--context=120", *options) == 0
    plain, eight = (json.loads(file.read_text()) for file in files)
    cells = [each["cells"]["decode 1 × 120"]["parts"] for each in (plain, eight)]
    assert cells[0].keys() == cells[1].keys() and eight["kv_cache_dtype"] == "int8"


def test_a_baseline_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "before.json"
    options = ("--batch=1", "--context=16")
    assert run("llama-gqa", *options, f"--json={file}") == 0
    assert "speed-up" not in capsys.readouterr().out
    assert run("llama-gqa", *options, f"--baseline={file}", "--clock=cpu", "--statistic=least") == 0
    assert "speed-up" in capsys.readouterr().out


def test_a_model_of_transformers_has_steps_without_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    options = ("--batch=1", "--context=16")
    assert run("llama-gqa", *options, f"--json={file}") == 0
    compared = (f"--baseline={file}", f"--json={file}")
    assert run("llama-gqa", *options, "--model-impl=transformers", *compared) == 0
    cell = json.loads(file.read_text())["cells"]["decode 1 × 16"]
    assert cell["step"]["ms"] > 0 and cell["parts"] == {}
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_with_states_has_steps(tmp_path: Path) -> None:
    """A sequence has few blocks of states, however long it is."""
    file = tmp_path / "step.json"
    folder = make_windowed("qwen3-next", tmp_path / "model")
    options = ("--batch=3", "--context=200", "--chunk=100", f"--json={file}")
    assert run(str(folder), *options) == 0  # an absolute path stands for itself
    cells = json.loads(file.read_text())["cells"]
    assert list(cells) == ["decode 3 × 200", "prefill 100"]
    assert all(cell["step"]["ms"] > 0 for cell in cells.values())


@pytest.mark.slow
def test_a_model_split_over_ranks_is_compared_with_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "whole.json"
    options = ("--batch=1", "--context=16", "--load-format=dummy")
    assert run("llama-gqa", *options, f"--json={file}") == 0
    assert run("llama-gqa", *options, "-tp", "2", f"--baseline={file}", f"--json={file}") == 0
    text, result = capsys.readouterr().out, json.loads(file.read_text())
    assert "2 × 1 threads" in text and "speed-up" in text
    assert result["tensor_parallel_size"] == 2
    assert run("llama-gqa", *options, "-tp", "3") != 0
    assert "--tensor-parallel-size 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--batch=4"], "--batch and --context go together"),
        (["--chunk=0"], "'0' is not a list of counts"),
        (["--chunk=" + "9" * 5000], "is not a list of counts"),
        (["--chunk=1,,2"], "not a list of counts"),
        (["--chunk=1000000"], "exceeds the model's"),
        (["--clock=cpu", "--threads=2"], "pass --threads 1"),
        (["--baseline=/nowhere.json"], "is not from this command"),
        (["--json=/nowhere/x.json", "--chunk=4"], "/nowhere/x.json"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run("llama-gqa", *options)
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--enforce-eager"]], ids=str)
def test_a_step_has_graphs_unless_it_is_eager(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here only the engine's options are made."""
    made: list[bool] = []

    async def measure(config: BenchStepConfig, cells: list[Cell], say: object) -> None:
        made.append(engine_config(config, cells).compilation.enforce_eager)

    monkeypatch.setattr(ranks, "measure_on_ranks", measure)
    monkeypatch.setattr(bench_main, "_show", lambda *_: None)
    assert run("llama-gqa", *options) == 0
    assert made == [bool(options)]
