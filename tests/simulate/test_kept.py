"""`pdserve calibrate` keeps what it has measured when it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paths import MODELS
from pdserve.cli.main import main
from pdserve.simulate import calibrate as calibrate_module
from pdserve.simulate.calibration import read_calibration


class InterruptedLLM:
    """A cluster that computes a token in a millisecond, and is interrupted at a question, counted
    from 1; 0: never."""

    def __init__(self, at: int) -> None:
        self.asked = 0
        self._at = at

    def generate(self, prompt, params, use_tqdm):
        self.asked += 1
        if self.asked == self._at:
            raise KeyboardInterrupt
        tokens, first = prompt["prompt_token_ids"], 1e-3 * len(prompt["prompt_token_ids"])
        timeline = {
            "queued": 0.0, "reserved": 0.0, "first_token": first, "transferred": first,
            "finished": first + 0.01 * params.n * (params.max_tokens - 1),
            "prefill_queue_seconds": 0.0, "prefill_seconds": first, "migrations": 0,
            "transfer_bytes": len(tokens), "decode_cached_tokens": 0,
        }  # fmt: skip
        return [SimpleNamespace(prompt_token_ids=tokens, timeline=timeline)]

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


POINTS = ["--chunk=10,100", "--cached=0", "--batch=1,4", "--context=16", "--cpu-threads=3"]


def calibrate(file: Path, llm: InterruptedLLM, monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(calibrate_module, "LLM", lambda **_: llm)
    return main(["calibrate", f"--output={file}", *POINTS, *flags])


@pytest.mark.parametrize("at", [1, 12, 30, 40, 54])
def test_an_interrupted_calibration_keeps_what_it_measured(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file, part = tmp_path / "it.json", tmp_path / "it.json.part"
    assert calibrate(file, InterruptedLLM(at), monkeypatch) == 130
    said = capsys.readouterr().err
    kept = part.read_text().count("\n") - 1 if part.exists() else 0
    assert (kept > 0) is (at > 20), "the first turn, with cold nodes, does not count"
    assert (f"measured points so far: {kept}; " in said) is (kept > 0)
    whole = kept // 6
    assert file.exists() is (whole > 0)
    if whole:  # it can be used at once
        assert f"has {whole} of 3 repetitions; run the same command to continue" in said
        assert [row[:2] for row in read_calibration(file).decode] == [(1, 16), (4, 16)]
    with part.open("a") as open_part:
        open_part.write('{"turn": 2, "poi')  # as a full disk leaves it
    assert calibrate(file, rest := InterruptedLLM(0), monkeypatch) == 0
    assert not part.exists()
    assert rest.asked
    assert (f"points measured before: {kept}" in capsys.readouterr().err) is (kept > 0)
    assert calibrate(tmp_path / "whole.json", full := InterruptedLLM(0), monkeypatch) == 0
    assert (rest.asked < full.asked) is (kept > 0)
    assert read_calibration(file).prefill == read_calibration(tmp_path / "whole.json").prefill


def test_kept_measurements_are_of_one_set_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file = tmp_path / "it.json"
    assert calibrate(file, InterruptedLLM(40), monkeypatch) == 130
    assert calibrate(file, InterruptedLLM(0), monkeypatch, "--max-num-seqs=9") == 2
    assert "it.json.part has measurements of an interrupted run with other options" in (
        capsys.readouterr().err
    )
    assert calibrate(file, unused := InterruptedLLM(0), monkeypatch, "--repetitions=1") == 0
    assert not unused.asked
    (tmp_path / "it.json.part").write_text("[]\n[]\n")
    assert calibrate(file, InterruptedLLM(0), monkeypatch) == 2
    assert "is not from this command: remove it" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_calibration_that_continues(tmp_path: Path) -> None:
    file, part = tmp_path / "it.json", tmp_path / "it.json.part"
    command = [str(Path(sys.executable).with_name("pdserve")), "calibrate", "--output", str(file)]
    command += ["--model", str(MODELS / "llama-gqa"), "--dtype", "float32", "--cpu-threads", "1"]
    command += ["--batch=1,2", "--context=32", "--chunk=16", "--cached=0", "--repetitions=20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        while not part.exists():
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None and "run the same command to continue" in run.stderr.read()
    assert run.returncode == 130
    again = subprocess.run([*command, "--repetitions=2"], stderr=subprocess.PIPE, text=True)
    assert again.returncode == 0, again.stderr
    assert "continuing an interrupted run" in again.stderr and not part.exists()
    read_calibration(file)
