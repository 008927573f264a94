"""Paged attention with FlashInfer (arXiv:2501.01005), for NVIDIA GPUs.

Uses FlashInfer's documented `plan`/`run` interface. On CPUs the tests run it with a fake of that
interface and check its calls against the installed package's signatures
(`tests/common/model/test_flashinfer.py`); on a GPU `tests/gpu/test_gpu_kernels.py` compares it with
the torch backend.
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
from pdserve.common.model.staging import Mark, upload

WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation
LAYOUT = "HND"  # blocks are [kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class FlashInferContext:
    slots: SlotMapping
    wrapper: Any  # planned for this step


class FlashInferAttention(AttentionBackend):
    """An `AttentionBackend`. Steps with only single queries use the decode kernel; all other steps
    use one call of the prefill kernel."""

    has_fixed = True

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        self._decode = self._decode_wrapper()
        self._block_ids = torch.empty(0, dtype=torch.int32, device=device)  # of fixed contexts
        self._planned = Mark(device)

    def _decode_wrapper(self, **buffers: Any) -> Any:
        tensor_cores = self.shape.num_heads >= 4 * self.shape.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=tensor_cores, **buffers
        )

    def prepare(self, batch: AttentionBatch) -> FlashInferContext:
        slots = SlotMapping.of(batch, self.device)
        ids = torch.from_numpy(np.concatenate(batch.used_tables()))
        block_ids = upload(ids, self.device).to(torch.int32)
        decoding = all(length == 1 for length in batch.query_lens)
        wrapper = self._decode if decoding else self._prefill
        self._plan(wrapper, batch, block_ids, decoding)
        return FlashInferContext(slots, wrapper)

    def fixed(self, size: int, slots: SlotMapping, max_blocks: int) -> FlashInferContext:
        def buffer(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self.device)

        if len(self._block_ids) < max_blocks:  # all sizes share it if the largest comes first
            self._block_ids = buffer(max_blocks)
        wrapper = self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffer(size + 1),
            paged_kv_indices_buffer=self._block_ids,
            paged_kv_last_page_len_buffer=buffer(size),
        )
        return FlashInferContext(slots, wrapper)

    def refill(self, context: FlashInferContext, batch: AttentionBatch, block_ids: Tensor) -> None:
        self._plan(context.wrapper, batch, block_ids.to(torch.int32), decoding=True)

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

    def _plan(self, wrapper: Any, batch: AttentionBatch, block_ids: Tensor, decoding: bool) -> None:
        """Plans a step. First waits until the last plan's copy has left the host buffer, which the
        wrapper overwrites, but not for steps queued after it."""
        self._planned.wait()
        tables, size = batch.used_tables(), batch.block_size
        offsets = [] if decoding else [_int32(batch.offsets)]
        wrapper.plan(
            *offsets,
            _int32(list(accumulate(map(len, tables), initial=0))),
            block_ids,
            _int32([(length - 1) % size + 1 for length in batch.context_lens]),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            size,
            sm_scale=self.shape.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            **({} if decoding else {"causal": True}),  # mask aligned to the end of the context
        )
        self._planned.set()


def _int32(values: Sequence[int]) -> Tensor:
    """Returns a host tensor: `plan` reads offsets and lengths there and copies them to the GPU."""
    return torch.tensor(values, dtype=torch.int32)
