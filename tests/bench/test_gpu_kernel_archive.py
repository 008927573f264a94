"""FlashInfer's compiled modules go to a GPU host and come back, without FlashInfer or a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_kernels


@pytest.fixture
def aot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of modules beside an empty FlashInfer 9.9.9, on a host with an H100."""
    site, package = tmp_path / "gpu-site", tmp_path / "gpu-site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    metadata = site / "flashinfer_python-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.9.9\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(gpu_kernels, "SITE", site)
    monkeypatch.setattr(gpu_kernels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return package / "data" / "aot"


def test_modules_compiled_on_one_host_are_found_on_the_next(aot: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "cache" / "9.9.9" / "90a" / "cached_ops" / "decode" / "decode.so"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("code")
    archive = gpu_kernels.pack(tmp_path)
    assert archive is not None and archive.name == "flashinfer-kernels-9.9.9-90a.tgz"
    (aot / "decode" / "decode.so").unlink()
    assert gpu_kernels.unpack(tmp_path) == 1
    assert (aot / "decode" / "decode.so").read_text() == "code"


def test_an_archive_for_another_card_stays_packed(
    aot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "decode" / "decode.so"
    library.parent.mkdir()
    library.touch()
    gpu_kernels.write(tmp_path / gpu_kernels.archive_name("90a"), [library])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert gpu_kernels.unpack(tmp_path) == 0
    assert not aot.exists()


def test_the_hosts_own_flashinfer_is_not_changed(
    aot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "SITE", tmp_path / "elsewhere")
    assert gpu_kernels.aot_folder() is None
    assert gpu_kernels.pack(tmp_path) is None
