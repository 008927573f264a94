"""`pdserve doctor --gpu` on FlashInfer: its answers are made up, and on a CPU it computes with a
fake."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import fake_flashinfer
from pdserve.cli import doctor_gpu
from pdserve.cli.finding import Verdict
from pdserve.common.model import attention_check

MODULE = "pdserve.common.model.attention_flashinfer"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield module.FlashInferAttention(attention_check.SHAPE, torch.device("cpu"), torch.float32)
    del sys.modules[MODULE]


def test_a_fake_flashinfer_is_right(backend: Any) -> None:
    assert attention_check.attention_error(backend) < 1e-5


@pytest.mark.parametrize("kernel", ["_decode", "_prefill"])
@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_either_kernel_of_a_fake_flashinfer_can_be_wrong(
    backend: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, factor: float
) -> None:
    wrapper = getattr(backend, kernel)
    run = wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda *args: run(*args) * factor)
    assert not attention_check.attention_error(backend) < 0.01


@pytest.mark.parametrize(
    ("code", "output", "verdict", "says"),
    [
        (0, '{"error": 0.0004, "seconds": 61}', Verdict.OK, "attends correctly (61 s)"),
        (0, '{"error": 0.3, "seconds": 1}', Verdict.FAILED, "wrong by 0.3"),
        (0, '{"error": NaN, "seconds": 1}', Verdict.FAILED, "wrong by nan"),
        (0, '{"why": "not installed"}', Verdict.WARNING, "not used"),
        (1, "a\nRuntimeError: Ninja build failed", Verdict.FAILED, "Ninja build failed"),
        (-11, "", Verdict.FAILED, "exit code -11"),
    ],
)
def test_the_verdict_follows_flashinfer_s_output(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, verdict: Verdict, says: str
) -> None:
    done = subprocess.CompletedProcess([], code, output, output)
    monkeypatch.setattr(doctor_gpu.subprocess, "run", lambda *args, **options: done)
    finding = doctor_gpu._flashinfer()
    assert finding.verdict is verdict and says in finding.seen
    assert bool(finding.fix) is (verdict is not Verdict.OK)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_flashinfer_the_program_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    attention_check.main()
    assert "pip install" in capsys.readouterr().out
