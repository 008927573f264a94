"""FlashInfer's two wrappers in plain torch, page by page, by its documentation: HND pages, queries
aligned to the end of their context. With `use_cuda_graph` a wrapper reads its arguments from the
buffers that `plan` filled, whatever they were at the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "HND" and not float_workspace_buffer.any()
        self.int_workspace = torch.empty(8 << 20, dtype=torch.uint8)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.calls.append(("__init__", (float_workspace_buffer, kv_layout), options))

    def _plan(
        self,
        queries: list[int],
        pages: tuple[Tensor, Tensor, Tensor],
        page_size: int,
        options: dict[str, Any],
    ) -> None:
        indptr, indices, filled = pages
        assert {each.dtype for each in pages} == {torch.int32}
        assert not indptr.is_cuda and not filled.is_cuda  # `plan` reads them
        self._queries, self._page_size = queries, page_size
        self._scale, self._before = options["sm_scale"], options["window_left"]
        self._tables = [
            indices[start:end].tolist()
            for start, end in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
        ]
        self._filled = filled.tolist()

    def forget_plan(self) -> None:
        del self._queries, self._tables, self._filled

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        self.calls.append(("run", (q, paged_kv_cache), {}))
        assert q.is_contiguous()
        rows, out = q.split(self._queries), []
        for queries, table, filled in zip(rows, self._tables, self._filled, strict=True):
            length = (len(table) - 1) * self._page_size + filled
            k, v = (part[table].transpose(0, 1).flatten(1, 2) for part in paged_kv_cache)
            out.append(self._attend(queries, k[:, :length], v[:, :length]))
        return torch.cat(out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = torch.einsum("thd,hld->htl", q, k) * self._scale
        positions = torch.arange(k.shape[1] - len(q), k.shape[1])[:, None]
        keys = torch.arange(k.shape[1])
        scores.masked_fill_(keys > positions, -torch.inf)
        if self._before >= 0:
            scores.masked_fill_(keys < positions - self._before, -torch.inf)
        return torch.einsum("htl,hld->thd", scores.softmax(-1), v)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, *args: Any, **options: Any) -> None:
        self.calls.append(("plan", args, options))
        offsets, *pages, heads, kv_heads, head_dim, page_size = args
        assert options["causal"] and heads % kv_heads == 0 and head_dim
        queries = offsets.diff().tolist()
        self._plan(queries, tuple(pages), page_size, options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, *args: Any, use_cuda_graph: bool = False, **options: Any) -> None:
        if use_cuda_graph:
            options["use_cuda_graph"] = True
        super().__init__(*args, **options)
        if use_cuda_graph:
            names = ("indptr", "indices", "last_page_len")
            self._buffers = [options[f"paged_kv_{name}_buffer"] for name in names]
            assert len(self._buffers[0]) == len(self._buffers[2]) + 1
            if options["use_tensor_cores"]:
                self.query_offsets = torch.arange(len(self._buffers[0]), dtype=torch.int32)
        self._fixed = use_cuda_graph

    def plan(self, *args: Any, **options: Any) -> None:
        self.calls.append(("plan", args, options))
        *pages, heads, kv_heads, head_dim, page_size = args
        assert heads % kv_heads == 0 and head_dim
        self._plan([1] * len(pages[2]), tuple(pages), page_size, options)
        if self._fixed:
            for buffer, values in zip(self._buffers, pages, strict=True):
                assert len(values) == len(buffer) or values is pages[1]
                buffer[: len(values)] = values

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        if not self._fixed:
            return super().run(q, paged_kv_cache)
        self.calls.append(("run", (q, paged_kv_cache), {}))
        indptr, indices, filled = self._buffers
        most = len(indices) // len(filled)  # pages of a sequence
        places = (indptr[:-1, None] + torch.arange(most)).clamp(max=len(indices) - 1)
        lengths = (indptr.diff() - 1) * self._page_size + filled
        keys = torch.arange(most * self._page_size)
        hidden = keys >= lengths[:, None]
        if self._before >= 0:
            hidden |= keys < lengths[:, None] - 1 - self._before
        k, v = (part[indices[places]].transpose(1, 2).flatten(2, 3) for part in paged_kv_cache)
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = torch.einsum("bhd,bhld->bhl", q, k) * self._scale
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        seen = v.masked_fill(hidden[:, None, :, None], 0)  # the kernels do not load hidden values
        return torch.einsum("bhl,bhld->bhd", weights, seen)
