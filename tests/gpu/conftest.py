"""Tests that need a GPU: `make test-gpu`. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wide_model import make_wide_model

HERE = Path(__file__).parent


# Kernels first: their compilation must not be part of a cluster's start.
ORDER = ("test_gpu_kernels", "test_gpu_steps", "test_gpu_clusters")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not torch.cuda.is_available():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a GPU (make test-gpu)"))
    others = [item for item in items if HERE not in item.path.parents]
    items[:] = [*others, *sorted(ours, key=lambda item: ORDER.index(item.path.stem))]


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))
