"""FlashInfer's own Python layer, up to its compiled kernels, takes our calls: without a GPU, where
the package can be imported, on a CPU and on a fake GPU. A wheel unpacked on PYTHONPATH, with
apache-tvm-ffi's and tabulate's, is enough: `python -m zipfile -e WHEEL FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fake_cuda import CUDA, NO_CUDA, fake_cuda
from pdserve.common.model.attention import AttentionBatch, AttentionShape, SlotMapping
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.staging import upload

pytest.importorskip("flashinfer", reason="FlashInfer cannot be imported")

CPU = torch.device("cpu")
STEPS = [
    AttentionBatch([1, 1, 1], [5, 30, 0], [[3, 9], [1, 4, 7], [2]], 16),
    AttentionBatch([1, 9, 20], [15, 30, 0], [[3, 9], [1, 4, 7], [2, 6]], 16),
]
REPLAYED = [
    AttentionBatch([1] * 4, [5, 30, 0, 1], [[3], [1, 4], [2], [9]], 16),
    AttentionBatch([1] * 4, [50, 30, 0, 1], [[3, 5, 6, 7], [1, 4], [2], [9]], 16),
]


@pytest.fixture(params=["fa2", "fa3"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a card for which FlashInfer chooses `param`."""
    from fake_kernels import fake_kernels

    return fake_kernels(monkeypatch, request.param)


@pytest.fixture(params=[CPU, pytest.param(CUDA, marks=NO_CUDA)], ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_cuda(monkeypatch) if request.param == CUDA else nullcontext():
        yield request.param


@pytest.mark.parametrize(("kv_heads", "decode"), [(2, "fa2"), (8, "decode")])
def test_all_calls_reach_fake_kernels(
    asked: Any,
    device: torch.device,
    request: pytest.FixtureRequest,
    kv_heads: int,
    decode: str,
) -> None:
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    fused = choose_kernels("auto", device).attention_input if device == CUDA else None
    backend = FlashInferAttention(AttentionShape(8, kv_heads, 128), device, torch.bfloat16, fused)
    cache = torch.zeros(1, 2, 10, kv_heads, 16, 128, dtype=torch.bfloat16, device=device)
    for batch in STEPS:
        count, heads = sum(batch.query_lens), 8 + 2 * kv_heads
        rows = torch.zeros(count, heads, 128, dtype=torch.bfloat16, device=device)
        angles = rows[:, :1, :64], rows[:, :1, :64]
        backend.attend(0, rows, None, angles, cache, backend.prepare(batch))
    slots = SlotMapping(*torch.zeros(3, 4, dtype=torch.int64, device=device))
    context = backend.fixed(4, slots, 40)
    for batch in REPLAYED:
        ids = torch.cat([torch.from_numpy(table) for table in batch.used_tables()])
        backend.refill(context, batch, upload(ids, device))
        context.wrapper.run(rows[:4, :8].contiguous(), cache[0].unbind())
    prefill = request.node.callspec.params["asked"]
    assert asked.run == [decode, prefill, decode, decode]
