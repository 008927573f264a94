"""The kernel before attention against torch: in the interpreter without a GPU, on the GPU where
there is one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fake_flashinfer
from interpreted import DEVICE
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch, AttentionShape, SlotMapping
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.kernels.gpu.attention_input import attention_input
from pdserve.common.model.kernels.gpu.ops import TritonKernels
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles
from pdserve.common.model.sharding import Sharding

BLOCK_SIZE, BLOCKS = 16, 12
SLOW = pytest.mark.slow
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW)]
# Blocks that begin, end and go on in a step, prompts and single queries.
BATCHES = [
    AttentionBatch([1, 1, 1, 1], [5, 32, 0, 15], [[3], [1, 4, 7], [2], [9]], BLOCK_SIZE),
    AttentionBatch([1, 3, 17], [16, 30, 0], [[3, 9], [1, 4, 7], [2, 6]], BLOCK_SIZE),
    AttentionBatch([16, 1], [0, 47], [[5], [1, 4, 7]], BLOCK_SIZE),
]


class Inputs:
    def __init__(self, shape: AttentionShape, dtype: torch.dtype, tokens: int) -> None:
        random = torch.Generator().manual_seed(0)

        def some(*size: int) -> Tensor:
            return torch.randn(size, generator=random).to(DEVICE, dtype)

        heads, dim = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        self.qkv = some(tokens, heads, dim)
        self.angles: Angles = (some(tokens, 1, dim // 2).cos(), some(tokens, 1, dim // 2).sin())
        # What a block's last owner left, NaN among it.
        self.cache = some(1, 2, BLOCKS, shape.num_kv_heads, BLOCK_SIZE, dim)
        self.cache[..., 3] = torch.nan
        sharding = Sharding(GroupCoordinator(), DEVICE, dtype)
        self.norms = (RMSNorm("q", dim, 1e-6, sharding), RMSNorm("k", dim, 1e-3, sharding))
        for norm in self.norms:
            norm.weight += some(dim)


class Kept(TorchAttention):
    """Keeps the queries that it would attend with."""

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, context: Any
    ) -> Tensor:
        context.write(kv_cache[layer], k, v)
        return q


def outcomes(
    inputs: Inputs, shape: AttentionShape, slots: SlotMapping, normed: bool, turned: bool
) -> Sequence[tuple[Tensor, Tensor]]:
    """Returns the queries and the cache, of torch and of the kernel."""
    norms, angles = inputs.norms if normed else None, inputs.angles if turned else None
    caches = inputs.cache.clone(), inputs.cache.clone()
    plain = Kept(shape, DEVICE, inputs.qkv.dtype)
    expected = plain.attend(0, inputs.qkv, norms, angles, caches[0], slots)
    found = attention_input(inputs.qkv, norms, angles, caches[1][0], slots)
    return (expected, caches[0]), (found, caches[1])


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=["decodes", "mixed", "full"])
@pytest.mark.parametrize("heads", [(4, 2, 64), (5, 1, 80)], ids=str)
def test_queries_and_cache_have_the_bits_of_torch_s(
    heads: tuple[int, int, int], batch: AttentionBatch, dtype: torch.dtype
) -> None:
    """In float32 a GPU may fuse a product and a sum, and so round once."""
    shape, slots = AttentionShape(*heads), SlotMapping.of(batch, DEVICE)
    inputs = Inputs(shape, dtype, len(slots.slots))
    for turned in (True, False):
        (q, cache), (our_q, our_cache) = outcomes(inputs, shape, slots, False, turned)
        if dtype == torch.float32 and DEVICE.type == "cuda":
            torch.testing.assert_close(our_q, q)
            torch.testing.assert_close(our_cache, cache, equal_nan=True)
        else:
            assert_same_bits(our_q, q)
            assert_same_bits(our_cache, cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64), (2, 1, 256)], ids=str)
def test_head_norms_are_torch_s_but_for_the_last_bit(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    shape, slots = AttentionShape(*heads), SlotMapping.of(BATCHES[1], DEVICE)
    inputs = Inputs(shape, dtype, len(slots.slots))
    limit = 4 * torch.finfo(dtype).eps
    for turned in (True, False):
        (q, cache), (our_q, our_cache) = outcomes(inputs, shape, slots, True, turned)
        torch.testing.assert_close(our_q, q, rtol=limit, atol=4 * limit)
        torch.testing.assert_close(our_cache, cache, rtol=limit, atol=4 * limit, equal_nan=True)
        assert_same_bits(our_cache[:, 1], cache[:, 1])  # values have no norm


def test_padding_of_graphs_goes_to_the_spare_block() -> None:
    """Its rows share a slot there, as `DecodeGraphs` fills them; all other blocks are as torch
    leaves them."""
    shape, spare = AttentionShape(4, 2, 64), BLOCKS - 1
    rows = [[3, 7, 2, spare, spare, spare], [0, 5, 15, 0, 0, 0], [3, spare, spare, *[spare] * 3]]
    integers = torch.from_numpy(np.array(rows, np.int64)).to(DEVICE)
    slots = SlotMapping(*integers)
    inputs = Inputs(shape, torch.bfloat16, 6)
    inputs.qkv[3:] = inputs.qkv[3]  # they compute the same token
    for angle in inputs.angles:
        angle[3:] = angle[3]
    (q, cache), (our_q, our_cache) = outcomes(inputs, shape, slots, False, True)
    assert_same_bits(our_q, q)
    assert_same_bits(our_cache, cache)


def test_blocks_that_a_step_does_not_begin_keep_what_follows() -> None:
    shape, batch = AttentionShape(4, 2, 64), AttentionBatch([1, 3], [5, 7], [[3], [1]], BLOCK_SIZE)
    inputs = Inputs(shape, torch.float32, 4)
    before = inputs.cache.clone()
    slots = SlotMapping.of(batch, DEVICE)
    attention_input(inputs.qkv, None, None, inputs.cache[0], slots)
    assert_same_bits(inputs.cache[0, :, 3, :, 6:], before[0, :, 3, :, 6:])
    assert_same_bits(inputs.cache[0, :, 1, :, 10:], before[0, :, 1, :, 10:])


def test_rows_of_another_dtype_or_size_are_refused() -> None:
    shape = AttentionShape(4, 2, 64)
    inputs = Inputs(shape, torch.float32, 1)
    slots = SlotMapping(*torch.zeros(3, 1, dtype=torch.int64, device=DEVICE))
    for cache in (inputs.cache[0].half(), inputs.cache[0][..., :32], inputs.cache[0].mT):
        with pytest.raises(ValueError, match="64 contiguous numbers"):
            attention_input(inputs.qkv, None, None, cache, slots)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the fake is for CPUs")
def test_flashinfer_takes_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of FlashInfer, which reads what the kernel has written."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    name = "pdserve.common.model.attention_flashinfer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module, shape = importlib.import_module(name), AttentionShape(4, 2, 64)
    monkeypatch.delitem(sys.modules, name)
    results = []
    for backend in (
        TorchAttention(shape, DEVICE, torch.float32),
        module.FlashInferAttention(shape, DEVICE, torch.float32, TritonKernels.attention_input),
    ):
        inputs = Inputs(shape, torch.float32, sum(BATCHES[1].query_lens))
        inputs.cache.nan_to_num_()
        context = backend.prepare(BATCHES[1])
        arguments = inputs.qkv, inputs.norms, inputs.angles, inputs.cache
        results.append((backend.attend(0, *arguments, context), inputs.cache))
    torch.testing.assert_close(*results)
