"""Decode steps as CUDA graphs: captured at start for some batch sizes, then replayed with one call
instead of one launch per kernel. Other batch sizes are padded with rows that use a spare block.

    step's integers ── one copy ──▶ a graph's own tensors ── replay ──▶ its output
    block tables    ── plan ──────▶ the attention's own buffers ──┘

A graph reads and writes the same memory each time: its output is valid until the next step. All
graphs write their output into one buffer, because only one runs at a time.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.common.config.engine import EngineConfig
from pdserve.common.model.attention import AttentionBatch, AttentionContext, SlotMapping
from pdserve.common.model.decoder import CausalLM, Decoder
from pdserve.common.model.moe import MoE
from pdserve.common.model.staging import upload_together
from pdserve.common.planning.kv_budget import blocks_per_sequence, format_bytes

logger = logging.getLogger(__name__)

# GPU memory of each graph outside torch: CUDA's copy of its kernels. An estimate.
CUDA_GRAPH_BYTES = 8 << 20

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], Callable[[], object]]
"""Runs a computation, which writes to memory that stays; returns a callable that does it again."""


class CudaCapture:
    """Captures graphs that share a memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Callable[[], object]:
        compute()  # autotuning and connecting communicators must not happen during capture
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads, such as NCCL's watchdog, use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return graph.replay


@dataclass(frozen=True, slots=True)
class Buffer:
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Buffers(NamedTuple):
    """The buffers that all graphs of a model share: `hidden`, the input of a stage after the first,
    and the `output`: float32 logits of the last stage, hidden states of the others."""

    hidden: Buffer | None
    output: Buffer

    @classmethod
    def of(cls, model: Decoder, size: int) -> Buffers:
        spec, stage = model.spec, model.stage
        states = Buffer((size, spec.hidden_size), model.dtype)
        logits = Buffer((size, spec.vocab_size), torch.float32)
        return cls(None if stage.first else states, logits if stage.last else states)


def kept_bytes(model: Decoder, sizes: Sequence[int], blocks_per_sequence: Sequence[int]) -> int:
    """Returns the bytes that `DecodeGraphs` keep in torch's memory between steps, without the
    activations, whose memory all graphs share."""
    buffers = sum(each.nbytes for each in Buffers.of(model, max(sizes)) if each is not None)
    integers = sum((2 + 3 * len(model.attentions)) * 8 * size for size in sizes)
    together = zip(model.attentions, blocks_per_sequence, strict=True)
    return buffers + integers + sum(each.fixed_bytes(sizes, count) for each, count in together)


@dataclass(frozen=True, slots=True)
class _Graph:
    size: int
    # int64 [2 + 3 · groups, size]: token ids, positions; per KV group blocks, slots, fresh blocks
    integers: Tensor
    contexts: Sequence[AttentionContext]
    replay: Callable[[], object]


class DecodeGraphs:
    """Graphs of steps in which each sequence computes one token and samples. They return logits on
    the last stage, hidden states on the others."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[Tensor],
        sizes: Sequence[int],
        blocks_per_sequence: Sequence[int],
        capture: Capture,
    ) -> None:
        """Captures the graphs, the largest first, because the others reuse its memory. All ranks
        must do this together. `caches`: `[layers, planes, num_blocks, …]` per KV group, as
        `blocks_per_sequence`; the last block of each must not belong to a sequence."""
        self._model, self._caches, device = model, caches, caches[0].device
        self._block_size, self._spares = caches[0].shape[4], [each.shape[2] - 1 for each in caches]
        self._blocks_per_sequence = blocks_per_sequence
        buffers = Buffers.of(model, max(sizes))
        self._hidden = None if buffers.hidden is None else buffers.hidden.zeros(device)
        self._output = buffers.output.zeros(device)
        found = [self._capture(size, capture) for size in sorted(set(sizes), reverse=True)]
        self._graphs = found[::-1]
        self.sizes = [graph.size for graph in self._graphs]

    def take(self, batch: AttentionBatch, num_sampled: int) -> bool:
        """Returns whether a graph fits the step; `num_sampled`: sequences that sample."""
        count = len(batch.query_lens)
        return num_sampled == count == sum(batch.query_lens) and count <= self.sizes[-1]

    def run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        batches: Sequence[AttentionBatch],
        hidden: Tensor | None,
        feed: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Returns `[B, vocab]` or `[B, hidden]`, valid until the next call. `batches`: one per KV
        group. `hidden`: output of the stage before. `feed` writes token ids that the host does not
        know."""
        count = len(token_ids)
        graph = self._graphs[bisect_left(self.sizes, count)]
        if self._hidden is not None and hidden is not None:
            self._hidden[:count] = hidden
        self._fill(graph, token_ids, positions, batches)
        if feed is not None:
            feed(graph.integers[0])
        graph.replay()
        return self._output[:count]

    def close(self) -> None:
        """Drops the graphs. Those with collectives must be gone before their communicators."""
        self._graphs, self.sizes = [], [0]

    # ---- one size ----

    @torch.inference_mode()
    def _capture(self, size: int, capture: Capture) -> _Graph:
        model, count = self._model, len(self._caches)
        device = self._caches[0].device
        integers = torch.zeros(2 + 3 * count, size, dtype=torch.int64, device=device)
        tokens, positions, *slots = integers
        contexts = [
            attention.fixed(size, SlotMapping(*slots[3 * i : 3 * i + 3]), size * blocks)
            for i, (attention, blocks) in enumerate(
                zip(model.attentions, self._blocks_per_sequence, strict=True)
            )
        ]
        graph = _Graph(size, integers, contexts, lambda: None)
        self._fill(graph, (), (), [AttentionBatch((), (), (), self._block_size)] * count)

        def compute() -> Tensor:
            inputs = tokens if self._hidden is None else self._hidden[:size]
            output = model.forward(inputs, positions, contexts, self._caches)
            computed = model.compute_logits(output) if model.stage.last else output
            return self._output[:size].copy_(computed)

        return _Graph(size, integers, contexts, capture(compute))

    def _fill(
        self,
        graph: _Graph,
        token_ids: Sequence[int],
        positions: Sequence[int],
        batches: Sequence[AttentionBatch],
    ) -> None:
        """Fills the graph's integers and its attentions' buffers."""
        missing = [0] * (graph.size - len(token_ids))
        rows: list[list[int]] = [[*token_ids, *missing], [*positions, *missing]]
        paddeds, ids = [], []
        for batch, spare in zip(batches, self._spares, strict=True):
            starts = [*batch.starts, *missing]
            tables = [*batch.block_tables, *[(spare,)] * len(missing)]
            padded = AttentionBatch([1] * graph.size, starts, tables, self._block_size)
            pages = padded.used_tables()  # the last block has the query's own slot
            blocks = [int(table[-1]) for table in pages]
            slots = [start % self._block_size for start in starts]
            fresh = [spare if slot else block for block, slot in zip(blocks, slots, strict=True)]
            rows += blocks, slots, fresh
            paddeds.append(padded)
            ids.append(torch.from_numpy(np.concatenate(pages)))
        filled = torch.tensor(rows)
        integers, *block_ids = upload_together((filled.flatten(), *ids), graph.integers.device)
        graph.integers.copy_(integers.view_as(graph.integers))
        for attention, context, padded, own in zip(
            self._model.attentions, graph.contexts, paddeds, block_ids, strict=True
        ):
            attention.refill(context, padded, own)


def graph_sizes(model: Decoder, engine: EngineConfig) -> tuple[int, ...]:
    """Returns the batch sizes to capture for this model; none on a CPU or if it cannot."""
    on_gpu = model.device.type == "cuda"
    return engine.graph_sizes if on_gpu and not why_eager(model) else ()


def why_eager(model: Decoder) -> str:
    """Returns why the model's steps cannot be captured, "" if they can."""
    if not isinstance(model, CausalLM):
        return "transformers computes it"
    for layer in model.layers:
        if isinstance(layer.mlp, MoE) and (number := layer.mlp.why_host_waits):
            return f"the host must know {number}"
    if not all(attention.has_fixed for attention in model.attentions):
        return "attention without FlashInfer has different shapes in each step"
    return ""


def build_graphs(
    model: Decoder, caches: Sequence[Tensor], engine: EngineConfig, max_model_len: int
) -> DecodeGraphs | None:
    """Captures the graphs. Returns None on a CPU, with --enforce-eager, or if steps cannot be
    captured, and logs why."""
    device = caches[0].device
    if device.type != "cuda" or not engine.graph_sizes:
        return None
    if reason := why_eager(model):
        logger.warning("decode steps are not captured as CUDA graphs: %s", reason)
        return None
    started, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    blocks = blocks_per_sequence(engine, model.spec.kv_groups, max_model_len)
    graphs = DecodeGraphs(model, caches, engine.graph_sizes, blocks, CudaCapture())
    taken = format_bytes(free - torch.cuda.mem_get_info(device)[0])
    seconds = time.monotonic() - started
    logger.info("# CUDA graphs: %d, captured in %.1f s, %s", len(graphs.sizes), seconds, taken)
    return graphs
