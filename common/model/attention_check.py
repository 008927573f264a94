"""Compiles FlashInfer's kernels on the first GPU and the one before them, computes with them and
compares with torch:

    python -m pdserve.common.model.attention_check

It runs in its own process, because a kernel that fails makes the GPU unusable for its process. It
prints a line of JSON: `{"why": …}` if FlashInfer is not used, else `{"error": …, "seconds": …}`.
"""

from __future__ import annotations

import json
import math
import time

import torch

from pdserve.common.model.attention import AttentionBackend, AttentionBatch, AttentionShape
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.device import choose_kernels, make_backend
from pdserve.common.model.flashinfer_limits import why_not
from pdserve.common.model.kernels.gpu import needs

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128)
BLOCK_SIZE = 16
# Queries of three sequences, which have 5, 30 and 0 tokens in the cache: a decode and a mixed step.
STEPS = ([1, 1, 1], [1, 9, 20])


def main() -> None:
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bfloat16 else torch.float16
    if why := why_not(SHAPE, dtype):
        print(json.dumps({"why": why}))
        return
    started = time.monotonic()
    device = torch.device("cuda", 0)
    needs.use_cache_dir()
    kernels = None if needs.missing() else choose_kernels("auto", device)
    error = attention_error(make_backend(SHAPE, device, dtype, kernels))
    print(json.dumps({"error": error, "seconds": time.monotonic() - started}))


def attention_error(backend: AttentionBackend) -> float:
    """Returns the largest difference of two steps from torch's; NaN if a result is NaN."""
    plain = TorchAttention(backend.shape, backend.device, backend.dtype)
    errors = [_difference(backend, plain, queries) for queries in STEPS]
    return max(errors, key=lambda error: (math.isnan(error), error))


def _difference(one: AttentionBackend, other: AttentionBackend, queries: list[int]) -> float:
    shape, random = one.shape, torch.Generator().manual_seed(0)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    batch = AttentionBatch(queries, [5, 30, 0], [[3, 5, 8], [1, 4, 7], [2, 6, 9]], BLOCK_SIZE)
    qkv = torch.randn(sum(queries), heads, shape.head_dim, generator=random)
    angle = torch.rand(sum(queries), 1, shape.head_dim // 2, generator=random)
    cos, sin = (part.to(one.device, one.dtype) for part in (angle.cos(), angle.sin()))
    rows = qkv.to(one.device, one.dtype)
    size = 1, 2, 10, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim
    cache = torch.randn(size, generator=random).to(one.device, one.dtype)
    found, expected = (
        each.attend(0, rows, None, (cos, sin), cache.clone(), each.prepare(batch))
        for each in (one, other)
    )
    return float((found - expected).abs().max())


if __name__ == "__main__":
    main()
