"""Paged attention by FlashInfer (arXiv:2501.01005), for NVIDIA GPUs.

Written against FlashInfer's documented `plan`/`run` interface. On CPUs the tests run it over a fake
of that interface and compare its calls with the installed package's signatures
(`tests/common/model/test_flashinfer.py`); on a GPU `tests/gpu/test_gpu_kernels.py` compares it
with the torch backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import flashinfer
import numpy as np
import torch
from torch import Tensor

from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    SlotMapping,
)

WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation
LAYOUT = "HND"  # blocks are [kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class FlashInferContext:
    slots: SlotMapping
    wrapper: Any  # planned for this step


class FlashInferAttention(AttentionBackend):
    """See `AttentionBackend`. Steps of single queries only use the decode kernel; the prefill
    kernel takes every other mixture in one call."""

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=shape.num_heads >= 4 * shape.num_kv_heads
        )

    def prepare(self, batch: AttentionBatch) -> FlashInferContext:
        slots = SlotMapping.of(batch, self.device)
        decoding = all(length == 1 for length in batch.query_lens)
        wrapper = self._plan_decode(batch) if decoding else self._plan_prefill(batch)
        return FlashInferContext(slots, wrapper)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        context: FlashInferContext,
    ) -> Tensor:
        cache = kv_cache[layer]
        context.slots.write(cache, k, v)
        out: Tensor = context.wrapper.run(q.contiguous(), (cache[0], cache[1]))
        return out

    def _plan_decode(self, batch: AttentionBatch) -> Any:
        self._decode.plan(
            *self._pages(batch),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            batch.block_size,
            sm_scale=self.shape.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return self._decode

    def _plan_prefill(self, batch: AttentionBatch) -> Any:
        self._prefill.plan(
            _int32(batch.offsets),
            *self._pages(batch),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            batch.block_size,
            causal=True,  # queries are aligned to the end of their context
            sm_scale=self.shape.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return self._prefill

    def _pages(self, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables in compressed rows: where each sequence's begin, all block ids, and how
        many slots of each last block are filled."""
        tables = batch.used_tables()
        filled = [(length - 1) % batch.block_size + 1 for length in batch.context_lens]
        return (
            _int32(list(accumulate(map(len, tables), initial=0))),
            torch.from_numpy(np.concatenate(tables).astype(np.int32)).to(self.device),
            _int32(filled),
        )


def _int32(values: Sequence[int]) -> Tensor:
    """On the host, where `plan` reads offsets and lengths; it copies them to the GPU itself."""
    return torch.tensor(values, dtype=torch.int32)
