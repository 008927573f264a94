"""A node on a GPU says what Triton lacks on its host before it launches a kernel."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from pdserve.common.config.engine import CacheConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.model.kernels.gpu import needs
from pdserve.common.worker import worker


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_this_host_lacks_nothing(tmp_path: Path) -> None:
    assert needs.missing() == ""
    assert (tmp_path / "triton").is_dir()


def test_a_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in needs.missing()
    monkeypatch.setenv("CC", "/opt/cc")
    assert needs.missing() == ""


def test_headers_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    assert "/nowhere/Python.h: install" in needs.missing()


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    assert "pip install triton" in needs.missing()


def test_the_folder_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/triton")
    assert "set TRITON_CACHE_DIR" in needs.missing()


def test_the_folder_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    monkeypatch.setattr(needs.os, "access", lambda path, mode: mode != os.W_OK)
    assert f"cannot write to {tmp_path}" in needs.missing()


def test_kernels_are_kept_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs.use_cache_dir()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("PDSERVE_CACHE", "/cache")
    needs.use_cache_dir()
    assert os.environ["TRITON_CACHE_DIR"] == "/cache/triton"


def test_a_rank_on_a_simulated_gpu_refuses_to_start_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needs, "missing", lambda: "Triton finds no C compiler: install gcc")
    with pytest.raises(ConfigError, match="on a GPU Triton finds no C compiler: install gcc"):
        worker._enter(torch.device("cuda", 0), CacheConfig())
    assert worker._enter(torch.device("cpu"), CacheConfig()) is None
