"""FlashInfer's own Python layer, up to its compiled kernels, takes our calls: without a GPU, where
the package can be imported, on a CPU and on a fake GPU. A wheel unpacked on PYTHONPATH, with
apache-tvm-ffi's and tabulate's, is enough: `python -m zipfile -e WHEEL FOLDER`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fake_cuda import CUDA, NO_CUDA, fake_cuda
from pdserve.common.model.attention import AttentionBatch, AttentionShape, SlotMapping
from pdserve.common.model.staging import upload

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer cannot be imported")

CPU = torch.device("cpu")
STEPS = [
    AttentionBatch([1, 1, 1], [5, 30, 0], [[3, 9], [1, 4, 7], [2]], 16),
    AttentionBatch([1, 9, 20], [15, 30, 0], [[3, 9], [1, 4, 7], [2, 6]], 16),
]
REPLAYED = [
    AttentionBatch([1] * 4, [5, 30, 0, 1], [[3], [1, 4], [2], [9]], 16),
    AttentionBatch([1] * 4, [50, 30, 0, 1], [[3, 5, 6, 7], [1, 4], [2], [9]], 16),
]


class FakeKernels:
    """A compiled module, and what it was asked."""

    def __init__(self, called: list[str], name: str) -> None:
        self._called, self._name = called, name

    def plan(self, *_: object) -> list[int]:
        return [0] * 15

    def _run(self, *_: object) -> None:
        self._called.append(self._name)

    run = paged_run = _run


@pytest.fixture(params=["fa2", "fa3"])
def called(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that were run, in order; on a card for which FlashInfer chooses `param`."""
    called: list[str] = []
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **options)
        return made

    def loader(kind: str) -> Callable[..., FakeKernels]:
        def load(*args: Any) -> FakeKernels:
            backend = args[0] if kind == "prefill" else "decode"
            return FakeKernels(called, backend)

        return load

    monkeypatch.setattr(torch, "empty", unpinned)
    fakes: dict[str, Any] = {
        "get_batch_prefill_module": loader("prefill"),
        "get_batch_decode_module": loader("decode"),
        "determine_attention_backend": lambda *_, **__: request.param,
        "device_support_pdl": lambda _: False,
        "_check_workspace_buffer_alignment": lambda *_: None,  # fakes have no address
        "block_sparse_indices_to_vector_sparse_offsets": lambda ids, *_: ids,  # a kernel of 0.5
    }
    for module in (flashinfer.prefill, flashinfer.decode):
        for name in fakes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, fakes[name])
        for name in [each for each in vars(module) if "compute_capability" in each]:
            monkeypatch.setattr(module, name, lambda *_, **__: (9, 0))
    yield called


@pytest.fixture(params=[CPU, pytest.param(CUDA, marks=NO_CUDA)], ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_cuda(monkeypatch) if request.param == CUDA else nullcontext():
        yield request.param


@pytest.mark.parametrize(("kv_heads", "decode"), [(2, "fa2"), (8, "decode")])
def test_all_calls_reach_fake_kernels(
    called: list[str],
    device: torch.device,
    request: pytest.FixtureRequest,
    kv_heads: int,
    decode: str,
) -> None:
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    backend = FlashInferAttention(AttentionShape(8, kv_heads, 128), device, torch.bfloat16)
    cache = torch.zeros(1, 2, 10, kv_heads, 16, 128, dtype=torch.bfloat16, device=device)
    for batch in STEPS:
        count, heads = sum(batch.query_lens), 8 + 2 * kv_heads
        rows = torch.zeros(count, heads, 128, dtype=torch.bfloat16, device=device)
        q, k, v = rows.split((8, kv_heads, kv_heads), dim=1)
        backend.forward(0, q, k, v, cache, backend.prepare(batch))
    slots = SlotMapping(*torch.zeros(3, 4, dtype=torch.int64, device=device))
    context = backend.fixed(4, slots, 40)
    for batch in REPLAYED:
        ids = torch.cat([torch.from_numpy(table) for table in batch.used_tables()])
        backend.refill(context, batch, upload(ids, device))
        context.wrapper.run(rows[:4, :8].contiguous(), cache[0].unbind())
    prefill = request.node.callspec.params["called"]
    assert called == [decode, prefill, decode, decode]
