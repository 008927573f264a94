"""The first run on a GPU as a program: a stage that fails or hangs stops no other. No stage runs as
it would on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import first_gpu_run
from benchmarks.first_gpu_run import FAILED, NOT_RUN, OK, Result, Run, main
from benchmarks.gpu_clusters import CLUSTERS, Served
from benchmarks.gpu_shapes import SHAPES, make_shape
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(first_gpu_run, "WORK", tmp_path / "work")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def breaks(run: Run) -> Iterator[Result]:
    yield run.checked("exits", python("print('words'); raise SystemExit(3)"), 60)
    yield run.checked("hangs", python("import time; time.sleep(60)"), 1)
    raise ValueError("odd")


def works(run: Run) -> Iterator[Result]:
    yield run.checked("works", python("print('all is well')"), 60)


def test_a_broken_stage_stops_no_other_stage(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"breaks": breaks, "kernels": works, "works": works}
    monkeypatch.setattr(first_gpu_run, "STAGES", stages)
    assert main(["--cpu", "--stages", ",".join(stages)]) == 1
    found = json.loads((work / "out" / "first-gpu-run.json").read_text())
    assert [(each["stage"], each["verdict"]) for each in found] == [
        ("exits", FAILED),
        ("hangs", FAILED),
        ("breaks", FAILED),
        ("kernels", NOT_RUN),
        ("works", OK),
    ]
    assert found[0]["says"] == "words" and "more than 1 s" in found[1]["says"]
    assert "| works | ok |" in capsys.readouterr().out
    assert "all is well" in (work / "out" / "first-gpu-run.log").read_text()


def test_without_time_nothing_is_begun(work: Path) -> None:
    assert main(["--cpu", "--stages", "machine", "--seconds", "0"]) == 0
    (found,) = json.loads((work / "out" / "first-gpu-run.json").read_text())
    assert found["verdict"] == NOT_RUN


def test_text_must_be_one_within_a_dtype() -> None:
    one, other, none = Served("a"), Served("b"), Served(error="it ended")
    served = [("float32", one), ("float32", one), ("bfloat16", one), ("bfloat16", other)]
    found = list(first_gpu_run._agreements([*served, ("float16", one), ("float16", none)]))
    assert [(each.stage, each.verdict) for each in found] == [
        ("exact float32", OK),
        ("exact bfloat16", FAILED),
    ]
    assert {cluster.group for cluster in CLUSTERS.values()} == {"float32", "bfloat16"}


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("8B", 8.19)])
def test_shapes_have_as_many_parameters_as_their_names_say(
    tmp_path: Path, name: str, billions: float
) -> None:
    spec = ModelSpec.from_folder(make_shape(tmp_path, SHAPES[name]))
    weights = Footprint(spec, "bfloat16").weights(Stage.whole(spec.num_layers))
    assert weights / 2e9 == pytest.approx(billions, rel=0.01)


def test_an_fp8_shape_keeps_8_bits_on_gpus(tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(make_shape(tmp_path, SHAPES["8B"], "fp8")).on_gpus()
    weights = Footprint(spec, "bfloat16").weights(Stage.whole(spec.num_layers))
    assert weights == pytest.approx(9.65e9, rel=0.01)  # embedding and head stay in 16 bits
