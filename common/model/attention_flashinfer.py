"""Paged attention with FlashInfer (arXiv:2501.01005), for NVIDIA GPUs.

Uses FlashInfer's documented `plan`/`run` interface. On CPUs the tests run it with a fake of that
interface and check its calls against the installed package's signatures
(`tests/common/model/test_flashinfer.py`); on a GPU `tests/gpu/test_gpu_kernels.py` compares it with
the torch backend.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
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
from pdserve.common.model.flashinfer_limits import (
    INT_WORKSPACE_BYTES,
    tensor_cores,
    workspace_bytes,
)
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles
from pdserve.common.model.staging import Mark, upload

LAYOUT = "HND"  # blocks are [kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class FlashInferContext:
    slots: SlotMapping
    wrapper: Any  # planned for this step


class FlashInferAttention(AttentionBackend):
    """An `AttentionBackend`. Steps with only single queries use the decode kernel; all other steps
    use one call of the prefill kernel."""

    has_fixed = True

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        attention_input: Callable[..., Tensor] | None = None,
    ) -> None:
        """`attention_input`: the kernel of that name in `Kernels`."""
        super().__init__(shape, device, dtype)
        self._attention_input = attention_input
        find_ninja()
        self._workspace = self._zeros(self._workspace_bytes())
        self._graph_workspace = self._workspace  # a larger one if `fixed` needs it
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        self._decode = self._decode_wrapper(self._workspace)
        self._block_ids = torch.empty(0, dtype=torch.int32, device=device)  # of fixed contexts
        self._planned = Mark(device)

    def _zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _workspace_bytes(self, graph_size: int = 0) -> int:
        multiprocessors = 0
        if self.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return workspace_bytes(self.shape, multiprocessors, graph_size)

    def _decode_wrapper(self, workspace: Tensor, **buffers: Any) -> Any:
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=tensor_cores(self.shape), **buffers
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

        # All sizes share what follows if the largest comes first.
        if len(self._block_ids) < max_blocks:
            self._block_ids = buffer(max_blocks)
        if len(self._graph_workspace) < (needed := self._workspace_bytes(size)):
            self._graph_workspace = self._zeros(needed)
        wrapper = self._decode_wrapper(
            self._graph_workspace,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffer(size + 1),
            paged_kv_indices_buffer=self._block_ids,
            paged_kv_last_page_len_buffer=buffer(size),
        )
        return FlashInferContext(slots, wrapper)

    def fixed_bytes(self, sizes: Sequence[int], blocks_per_query: int) -> int:
        largest, workspace = max(sizes), self._workspace_bytes(max(sizes))
        shared = 4 * largest * blocks_per_query
        if workspace > len(self._workspace):
            shared += workspace
        # Offsets of blocks and lengths of last blocks; tensor cores want offsets of queries, too.
        lists = [2 * size + 1 + (size + 1 if tensor_cores(self.shape) else 0) for size in sizes]
        return shared + len(sizes) * INT_WORKSPACE_BYTES + 4 * sum(lists)

    def refill(self, context: FlashInferContext, batch: AttentionBatch, block_ids: Tensor) -> None:
        self._plan(context.wrapper, batch, block_ids.to(torch.int32), decoding=True)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles | None,
        kv_cache: Tensor,
        context: FlashInferContext,
    ) -> Tensor:
        if self._attention_input is None:
            return super().attend(layer, qkv, norms, angles, kv_cache, context)
        q = self._attention_input(qkv, norms, angles, kv_cache[layer], context.slots)
        return self._run(q, kv_cache[layer], context)

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
        return self._run(q.contiguous(), cache, context)

    def _run(self, q: Tensor, cache: Tensor, context: FlashInferContext) -> Tensor:
        out: Tensor = context.wrapper.run(q, (cache[0], cache[1]))
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
            window_left=(self.shape.window or 0) - 1,  # tokens before the query; -1: all
            sm_scale=self.shape.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            **({} if decoding else {"causal": True}),  # mask aligned to the end of the context
        )
        self._planned.set()


def find_ninja() -> None:
    """Lets FlashInfer find `ninja`, with which it compiles and which pip installs beside Python, in
    a virtual environment that is not activated."""
    if shutil.which("ninja") is None:
        found = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = os.pathsep.join((found, os.path.dirname(sys.executable)))


def _int32(values: Sequence[int]) -> Tensor:
    """Returns a host tensor: `plan` reads offsets and lengths there and copies them to the GPU."""
    return torch.tensor(values, dtype=torch.int32)
