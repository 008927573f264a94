"""The sampler with the kernel that draws on GPUs: in Triton's interpreter without one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from interpreted import DEVICE
from pdserve.common.model.kernels.gpu import sampling
from pdserve.common.worker import sampler
from sampler_cases import compare

ROWS = int(os.environ.get("FUZZ_ROWS", 50))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sampler uses the kernel on a CPU, too, and rows have several blocks."""
    monkeypatch.setattr(sampler, "_fused", lambda logits: True)
    monkeypatch.setattr(sampling, "BLOCK", 32)
    with torch.device(DEVICE):
        yield


@pytest.mark.usefixtures("fused")
def test_every_row_is_what_a_slow_sampler_says() -> None:
    seen = compare(ROWS, batch=50, nudge=3e-6, float32=True)
    assert seen["threshold"] <= ROWS / 50
    assert min(seen["odd"], seen["failed"]) > 0 and seen["equal"] > ROWS * 0.6
