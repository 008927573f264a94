"""`pdserve doctor --gpu` on FlashInfer and Triton: their answers are made up. On a CPU FlashInfer
is a fake, and Triton's kernel is interpreted."""

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
from interpreted import DEVICE
from pdserve.cli import doctor_gpu
from pdserve.cli.finding import Finding, Verdict
from pdserve.common.model import attention_check
from pdserve.common.model.kernels.gpu import check as kernel_check

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


OK = '{"error": 1e-6, "seconds": 61}'


@pytest.mark.parametrize(
    ("check", "code", "output", "verdict", "says"),
    [
        ("_flashinfer", 0, OK, Verdict.OK, "attends correctly (61 s)"),
        ("_flashinfer", 0, '{"error": 0.3, "seconds": 1}', Verdict.FAILED, "wrong by 0.3"),
        ("_flashinfer", 0, '{"error": NaN, "seconds": 1}', Verdict.FAILED, "wrong by nan"),
        ("_flashinfer", 0, '{"why": "not installed"}', Verdict.WARNING, "not installed"),
        ("_flashinfer", 1, "a\nRuntimeError: Ninja build failed", Verdict.FAILED, "CUDA_HOME"),
        ("_flashinfer", 1, "OSError: Read-only file system", Verdict.FAILED, "WORKSPACE_BASE"),
        ("_flashinfer", -11, "", Verdict.FAILED, "exit code -11"),
        ("_triton", 0, OK, Verdict.OK, "computes correctly (61 s)"),
        ("_triton", 0, '{"error": 0.01, "seconds": 1}', Verdict.FAILED, "wrong by 0.01"),
        ("_triton", 0, '{"error": NaN, "seconds": 1}', Verdict.FAILED, "wrong by nan"),
        ("_triton", 0, '{"why": "no compiler: install gcc"}', Verdict.FAILED, "install gcc"),
        ("_triton", 1, "a.c: Python.h: No such file\nError", Verdict.FAILED, "python3-dev"),
        ("_triton", 1, "libcuda.so cannot found!\na", Verdict.FAILED, "TRITON_LIBCUDA_PATH"),
        ("_triton", 1, "a\nCalledProcessError: gcc", Verdict.FAILED, "CalledProcessError"),
    ],
)
def test_the_verdict_follows_made_up_output(
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    code: int,
    output: str,
    verdict: Verdict,
    says: str,
) -> None:
    done = subprocess.CompletedProcess([], code, output, output)
    monkeypatch.setattr(doctor_gpu.subprocess, "run", lambda *args, **options: done)
    finding = getattr(doctor_gpu, check)()
    assert finding.verdict is verdict and says in f"{finding.seen} {finding.fix}"
    assert bool(finding.fix) is (verdict is not Verdict.OK)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_flashinfer_the_program_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    attention_check.main()
    assert "pip install" in capsys.readouterr().out


def test_the_kernel_of_the_triton_check_is_right() -> None:
    assert kernel_check.kernel_error(DEVICE) < doctor_gpu.KERNEL_TOLERANCE


def test_fake_gpus_get_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them: a check of each, then those of the host, each in a process of its own."""
    programs: list[str] = []

    def computed(module: str) -> dict[str, float]:
        programs.append(module)
        return {"error": 0.0, "seconds": 1.0}

    def finding(subject: str) -> Finding:
        return Finding(subject, Verdict.OK, "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor_gpu, "_torch", lambda: finding("torch for CUDA"))
    monkeypatch.setattr(doctor_gpu, "_gpu", lambda device: iter([finding(str(device))]))
    monkeypatch.setattr(doctor_gpu, "_computed", computed)
    subjects = [each.subject for each in doctor_gpu.gpus()]
    assert subjects[1:] == [
        "torch for CUDA",
        "cuda:0",
        "cuda:1",
        "topology",
        "triton",
        "flashinfer",
    ]
    assert programs == [doctor_gpu.TRITON, doctor_gpu.FLASHINFER]
