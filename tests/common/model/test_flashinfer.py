"""FlashInfer is called as it wants to be called. Needs no GPU: signatures are read, not run, and a
fake computes what the documentation says."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import fake_flashinfer
from flashinfer_signatures import FILES, TABLE, Rows, methods, signature
from paths import ROOT
from pdserve.common.model.attention import AttentionBatch, AttentionShape, SlotMapping
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.flashinfer_limits import BEYOND, OLDEST, workspace_bytes

INSTALLED = find_spec("flashinfer")
MODULE = "pdserve.common.model.attention_flashinfer"
SHAPE = AttentionShape(8, 2, 64)
CPU = torch.device("cpu")
IDS = torch.tensor([3, 1, 4])
BATCHES = [
    AttentionBatch([1, 1, 1], [5, 30, 0], [[3, 9], [1, 4, 7], [2]], 16),
    AttentionBatch([1, 9, 20], [15, 30, 0], [[3, 9], [1, 4, 7], [2, 6]], 16),
]


@pytest.fixture
def shape() -> AttentionShape:
    return SHAPE


@pytest.fixture
def backend(shape: AttentionShape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield module.FlashInferAttention(shape, CPU, torch.float32)
    del sys.modules[MODULE]


def attend(backend: Any, batch: AttentionBatch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    total = sum(batch.query_lens)
    q = torch.randn(total, 8, 64, generator=generator)
    k, v = torch.randn(2, total, 2, 64, generator=generator)
    cache = torch.randn(1, 2, 10, 2, batch.block_size, 64, generator=generator)
    result: torch.Tensor = backend.forward(0, q, k, v, cache, backend.prepare(batch))
    return result


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, window=7)], ids=["all", "window"])
@pytest.mark.parametrize("batch", BATCHES, ids=["decodes", "mixed"])
def test_it_equals_torch(backend: Any, shape: AttentionShape, batch: AttentionBatch) -> None:
    expected = attend(TorchAttention(shape, CPU, torch.float32), batch)
    torch.testing.assert_close(attend(backend, batch), expected)


@pytest.mark.parametrize("shape", [AttentionShape(64, 8, 128)], ids=["64 heads"])
def test_large_graphs_get_a_workspace_of_their_plan(backend: Any, shape: AttentionShape) -> None:
    """And they share it, the largest first; eager steps keep theirs."""
    needed = workspace_bytes(shape, 0, 256)
    assert needed > len(backend._workspace)
    before = backend.fixed_bytes((256, 8), 4)
    sizes = []
    for size in (256, 8):
        slots = SlotMapping(*torch.zeros(3, size, dtype=torch.int64))
        (_, (workspace, _), _) = backend.fixed(size, slots, 4 * size).wrapper.calls[0]
        sizes.append((len(workspace), workspace.data_ptr()))
    assert sizes[0] == sizes[1] and sizes[0][0] == needed
    assert before > needed


def test_ninja_is_found_beside_python(
    backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a virtual environment that is not activated."""
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    type(backend)(SHAPE, CPU, torch.float32)
    assert shutil.which("ninja") == str(ninja)


def signatures_of(version: str) -> dict[str, dict[str, list[Rows]]]:
    """By class and method: recorded, or of what is installed."""
    if version != "installed":
        found: dict[str, dict[str, list[Rows]]] = json.loads(TABLE.read_text())[version]["classes"]
        return found
    if INSTALLED is None or INSTALLED.origin is None:
        pytest.skip("FlashInfer is not installed")
    folder = Path(INSTALLED.origin).parents[1]
    return {name: methods((folder / file).read_text(), name) for name, file in FILES.items()}


@pytest.mark.parametrize("version", [*json.loads(TABLE.read_text()), "installed"])
def test_its_signatures_take_our_calls(backend: Any, version: str) -> None:
    known = signatures_of(version)
    for batch in BATCHES:
        attend(backend, batch)
    slots = SlotMapping(*torch.zeros(3, 2, dtype=torch.int64))
    context = backend.fixed(2, slots, 4)
    backend.refill(context, AttentionBatch([1, 1], [5, 20], [[3], [1, 4]], 16), IDS)
    context.wrapper.run(torch.zeros(2, 8, 64), torch.zeros(2, 10, 2, 16, 64).unbind())
    for wrapper in (backend._prefill, backend._decode, context.wrapper):
        name = type(wrapper).__name__
        for method, args, options in wrapper.calls:
            overloads = map(signature, known[name][method])
            assert any(takes(each, args, options) for each in overloads), (name, method)
        assert {method for method, _, _ in wrapper.calls} == {"__init__", "plan", "run"}


def test_the_oldest_and_the_newest_version_allowed_are_recorded() -> None:
    versions = sorted(map(Version, json.loads(TABLE.read_text())))
    assert versions[0] == OLDEST and versions[-1] < BEYOND
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = f"flashinfer-python>={OLDEST},<{BEYOND}"
    assert extras["optional-dependencies"]["cuda"] == [wanted]


# Query heads, KV heads, head size, largest graph: bytes by FlashInfer 0.6.6's `PrefillPlan` and
# `DecodePlan` on an H100 of 132 multiprocessors, worked out by hand from its sources.
WORKSPACES = [
    ((32, 8, 128), 0, 32 * 33 * 128 * 129 * 4),
    ((64, 8, 128), 0, 64 * 33 * 128 * 129 * 4),  # 139 MB
    ((32, 8, 128), 256, 32 * (64 + 255) * 16 * 129 * 4),
    ((32, 8, 128), 512, 32 * (128 + 511) * 16 * 129 * 4),  # 169 MB
    ((64, 8, 128), 256, 64 * (128 + 255) * 16 * 129 * 4),  # 202 MB
    ((64, 8, 128), 8, 64 * 33 * 16 * 129 * 4),  # thread blocks decide
    ((28, 4, 128), 512, 28 * (224 + 511) * 16 * 129 * 4),
    ((96, 1, 256), 64, 96 * (96 + 63 + 105) * 64 * 257 * 4),  # 264 thread blocks
    ((16, 8, 128), 512, 16 * 264 * 129 * 4),  # without tensor cores
]


@pytest.mark.parametrize(("heads", "size", "expected"), WORKSPACES, ids=str)
def test_the_workspace_is_as_large_as_its_plan(
    heads: tuple[int, int, int], size: int, expected: int
) -> None:
    found = workspace_bytes(AttentionShape(*heads), 132, size)
    assert found >= expected
    assert found <= max(expected + 32, 128 * 2**20)


def takes(wanted: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    try:
        wanted.bind(None, *args, **options)
    except TypeError:
        return False
    return True
