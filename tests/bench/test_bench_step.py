"""`pdserve bench step` on tiny models: what is measured, what the table says, what is refused.
How long anything takes is nobody's business here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paths import ROOT
from pdserve.bench import parts
from pdserve.bench.main import cells
from pdserve.bench.parts import PartTimer
from pdserve.bench.step import Cell
from pdserve.cli.main import main
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.step_shape import StepShape
from pdserve.common.worker import runner
from tiny_engine import load, new_cache, single_threaded_inference

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


def test_a_baseline_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "before.json"
    options = ("--batch=1", "--context=16")
    assert run("llama-gqa", *options, f"--json={file}") == 0
    assert "speed-up" not in capsys.readouterr().out
    assert run("llama-gqa", *options, f"--baseline={file}", "--clock=cpu", "--statistic=least") == 0
    assert "speed-up" in capsys.readouterr().out


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


def test_the_model_is_left_as_it_was() -> None:
    model = load(MODELS / "llama-gqa")
    timer = PartTimer(model, lambda: 0.0)
    places = [(owner, name) for _, owner, name in timer._places()]
    before = [vars(owner)[name] for owner, name in places]
    with pytest.raises(KeyError), timer.installed():
        assert [vars(owner)[name] for owner, name in places] != before
        raise KeyError
    assert [vars(owner)[name] for owner, name in places] == before


def test_timer_counts_what_is_within_a_part_for_the_part_within() -> None:
    """With a clock that each reading of it moves by one: a part's own time are the readings that
    are not of parts within it."""
    readings = iter(range(10**9))
    with single_threaded_inference():
        model = load(MODELS / "llama-gqa")
        timer = PartTimer(model, lambda: float(next(readings)))
        timer._own_cost = 0.0
        batch = Cell.decode(2, 20).batch(16, model.spec.vocab_size)
        with timer.installed():
            started = next(readings)
            runner.ModelRunner(model, new_cache(model), model.attention.device, True).run(batch)
            ended = next(readings)
    assert timer.seconds.keys() == set(parts.ORDER) - {"experts"}
    assert timer.seconds["down_proj"] == model.spec.num_layers  # nothing else is within it
    assert min(timer.seconds.values()) > 0
    # All of them together are the outermost: nothing is counted twice or lost.
    assert sum(timer.seconds.values()) == ended - started - 2


def test_cells() -> None:
    assert [cell.name for cell in cells(BenchStepConfig())] == [
        "decode 1 × 128",
        "decode 8 × 128",
        "decode 32 × 128",
        "decode 32 × 1,024",
        "prefill 512",
    ]
    assert Cell.decode(3, 33).shape == StepShape(3, 96, 99, 3, steps=1, sampling_steps=1)
    batch = Cell.decode(3, 33).batch(block_size=16, vocab_size=50)
    assert [(each.start, len(each.token_ids)) for each in batch.sequences] == [(32, 1)] * 3
    tables = [block for each in batch.sequences for block in each.block_table]
    assert sorted(tables) == list(range(9))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--batch=4"], "--batch and --context go together"),
        (["--chunk=0"], "'0' is not a list of counts"),
        (["--chunk=1,,2"], "not a list of counts"),
        (["--chunk=1000000"], "exceeds the model's"),
        (["--clock=cpu", "--threads=2"], "pass --threads 1"),
        (["--baseline=/nowhere.json"], "is not from this command"),
        (["--json=/nowhere/x.json", "--chunk=4"], "/nowhere/x.json"),
    ],
)
def test_what_makes_no_sense(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run("llama-gqa", *options)
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert reason in capsys.readouterr().err


def test_counts_are_counts() -> None:
    with pytest.raises(ConfigError):
        cells(BenchStepConfig(chunk="many"))
