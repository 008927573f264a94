"""Paged attention in plain torch, for CPUs and for GPUs without FlashInfer.

Sequences with one query (decodes) are gathered from the cache into one padded batch per bucket
of similar length, and attended in one call. Longer queries (prefill chunks) take one
call each. Both pass KV heads without repeating them for the query heads that share them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    BlockIds,
    SlotMapping,
    pad_tables,
)


@dataclass(frozen=True, slots=True)
class Decodes:
    """B sequences with one query each."""

    rows: Tensor  # [B] row of the token in the step
    gather: Tensor  # [B · kv_heads · blocks] rows of the cache viewed as [N · kv_heads, S · D]
    length: int  # longest context
    mask: Tensor | None  # [B, 1, 1, length] added to the scores; None: all see all of this length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several queries."""

    start: int  # row of its first token in the step
    end: int
    gather: Tensor | None  # as for decodes; None: no context before this step
    length: int
    mask: Tensor | None  # [queries, length]; None: plain causal, without a context before


@dataclass(frozen=True, slots=True)
class TorchContext:
    slots: SlotMapping
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class TorchAttention(AttentionBackend):
    """An `AttentionBackend`."""

    def prepare(self, batch: AttentionBatch) -> TorchContext:
        tables, lengths, offsets = batch.used_tables(), batch.context_lens, batch.offsets
        buckets: defaultdict[int, list[int]] = defaultdict(list)
        chunks = []
        for i, query_len in enumerate(batch.query_lens):
            if query_len == 1:
                buckets[len(tables[i]).bit_length()].append(i)
            else:
                chunks.append(self._chunk(offsets[i], query_len, tables[i], lengths[i]))
        decodes = [
            self._decodes(
                [offsets[i] for i in group], [tables[i] for i in group], [lengths[i] for i in group]
            )
            for group in buckets.values()
        ]
        return TorchContext(SlotMapping.of(batch, self.device), tuple(decodes), tuple(chunks))

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, context: TorchContext
    ) -> Tensor:
        cache = kv_cache[layer]
        context.slots.write(cache, k, v)
        out = torch.empty_like(q)
        for group in context.decodes:
            out[group.rows] = self._attend_decodes(q[group.rows], cache, group)
        for chunk in context.chunks:
            part = slice(chunk.start, chunk.end)
            out[part] = self._attend_chunk(q[part], k[part], v[part], cache, chunk)
        return out

    # ---- once per step ----

    def _decodes(self, rows: list[int], tables: list[BlockIds], lengths: list[int]) -> Decodes:
        longest = max(lengths)
        mask = None
        if min(lengths) < longest or self._slides(longest):
            mask = self._mask(torch.tensor(lengths) - 1, longest)[:, None, None]
        return Decodes(torch.tensor(rows).to(self.device), self._gather(tables), longest, mask)

    def _chunk(self, offset: int, queries: int, table: BlockIds, length: int) -> Chunk:
        fresh = queries == length
        mask = None
        if not fresh or self._slides(length):
            mask = self._mask(torch.arange(length - queries, length), length)
        gather = None if fresh else self._gather([table])
        return Chunk(offset, offset + queries, gather, length, mask)

    def _slides(self, length: int) -> bool:
        """Returns whether the last of `length` tokens does not attend to all of them."""
        return self.shape.window is not None and length > self.shape.window

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """Returns what is added to the scores of queries at `positions`, `[queries, length]`: 0 for
        visible keys, -inf for hidden ones."""
        keys, last = torch.arange(length), positions[:, None]
        hidden, window = keys > last, self.shape.window
        if window is not None and self.shape.chunked:  # the first key begins a chunk
            hidden |= keys < last // window * window
        elif window is not None:
            hidden |= keys <= last - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self.device)

    def _gather(self, tables: list[BlockIds]) -> Tensor:
        """Returns the cache row of each (sequence, head, block)."""
        heads = self.shape.num_kv_heads
        rows = pad_tables(tables)[:, None] * heads + torch.arange(heads)[:, None]
        return rows.flatten().to(self.device)

    # ---- once per layer ----

    def read(self, cache: Tensor, gather: Tensor, length: int) -> Tensor:
        """Gathers keys or values [N, heads, S, D] into [B, heads, length, D], in runs of S · D
        elements, because blocks are head-major."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        runs = cache.view(cache.shape[0] * heads, -1).index_select(0, gather)
        slots = -(-length // cache.shape[2]) * cache.shape[2]
        return runs.view(-1, heads, slots, dim)[:, :, :length]

    def _attend_decodes(self, q: Tensor, cache: Tensor, group: Decodes) -> Tensor:
        """Attends with the query heads that share a KV head as its queries: [B, kv_heads, G, D]."""
        keys = self.read(cache[0], group.gather, group.length)
        values = self.read(cache[1], group.gather, group.length)
        grouped = q.view(q.shape[0], self.shape.num_kv_heads, -1, self.shape.head_dim)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=self.shape.scale
        )
        return out.reshape(q.shape)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, chunk: Chunk) -> Tensor:
        """Attends with KV heads as the batch and the query heads that share one as heads:
        [kv_heads, G, T, D] × [kv_heads, 1 → G, length, D], where 1 → G is an expanded view."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        if chunk.gather is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys = self.read(cache[0], chunk.gather, chunk.length)[0]
            values = self.read(cache[1], chunk.gather, chunk.length)[0]
        queries = q.view(q.shape[0], heads, -1, dim).permute(1, 2, 0, 3)
        shared = (-1, queries.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(
            queries,
            keys[:, None].expand(shared),
            values[:, None].expand(shared),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.shape.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape)
