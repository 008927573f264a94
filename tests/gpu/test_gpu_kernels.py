"""The code that runs on a GPU alone, against the same in plain torch. What Triton's interpreter can
run, too, is in `tests/common/model/test_triton_*.py`."""

from __future__ import annotations

import pytest
import torch

from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch, AttentionShape
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.expert_weights import grouped_linear
from pdserve.common.model.kernels.gpu.ops import TritonKernels
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.sharding import Sharding

BLOCK_SIZE = 16
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (32, 4)], ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(128, None), (64, None), (256, None), (128, 7)])
def test_flashinfer_equals_torch(
    head_dim: int, window: int | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    pytest.importorskip("flashinfer")
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    shape, cuda = AttentionShape(*heads, head_dim, window), torch.device("cuda")
    for queries in ([1, 1, 1], [1, 9, 20], [33, 1, 1]):
        tables = [[3, 5, 8], [1, 4, 7], [2, 6, 9]]
        batch = AttentionBatch(queries, [5, 30, 0], tables, BLOCK_SIZE)
        total = sum(queries)
        q = torch.randn(total, heads[0], head_dim, dtype=dtype, device=cuda)
        k, v = torch.randn(2, total, heads[1], head_dim, dtype=dtype, device=cuda)
        cache = torch.randn(1, 2, 10, heads[1], BLOCK_SIZE, head_dim, dtype=dtype, device=cuda)
        written, outputs = [], []
        for kind in (TorchAttention, FlashInferAttention):
            backend = kind(shape, cuda, dtype)
            written.append(cache.clone())
            context = backend.prepare(batch)
            outputs.append(backend.forward(0, q, k, v, written[-1], context))
        torch.testing.assert_close(*outputs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(*written, rtol=0, atol=0)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head norms"])
def test_one_kernel_before_attention_equals_torch(normed: bool) -> None:
    pytest.importorskip("flashinfer")
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    shape, cuda, dtype = AttentionShape(8, 2, 128), torch.device("cuda"), torch.bfloat16
    sharding = Sharding(GroupCoordinator(), cuda, dtype)
    norms = RMSNorm("q", 128, 1e-6, sharding), RMSNorm("k", 128, 1e-6, sharding)
    for norm in norms:
        norm.weight += torch.rand(128, dtype=dtype, device=cuda)
    for queries in ([1, 1, 1], [1, 9, 20]):
        batch = AttentionBatch(queries, [5, 32, 0], [[3, 5, 8], [1, 4, 7], [2, 6, 9]], BLOCK_SIZE)
        qkv = torch.randn(sum(queries), 12, 128, dtype=dtype, device=cuda)
        angle = torch.rand(sum(queries), 1, 64, device=cuda)
        angles = angle.cos().to(dtype), angle.sin().to(dtype)
        cache = torch.randn(1, 2, 10, 2, BLOCK_SIZE, 128, dtype=dtype, device=cuda)
        written, outputs = [], []
        for backend in (
            TorchAttention(shape, cuda, dtype),
            FlashInferAttention(shape, cuda, dtype, TritonKernels.attention_input),
        ):
            written.append(cache.clone())
            context, chosen = backend.prepare(batch), norms if normed else None
            outputs.append(backend.attend(0, qkv, chosen, angles, written[-1], context))
        torch.testing.assert_close(*outputs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        limit = TOLERANCE[dtype] if normed else 0
        torch.testing.assert_close(*written, rtol=limit, atol=limit)


def test_the_grouped_kernel_equals_the_loop() -> None:
    x = torch.randn(300, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(5, 128, 64, dtype=torch.bfloat16, device="cuda")
    counts = torch.tensor([0, 100, 7, 193, 0])
    expected = grouped_linear(x.cpu(), weight.cpu(), counts)
    torch.testing.assert_close(
        grouped_linear(x, weight, counts.cuda()).cpu(), expected, rtol=2e-2, atol=2e-1
    )
