"""Sparse attention with an indexer (DeepSeek V3.2): besides its KV a layer keeps a small key per
token, with which each query chooses the tokens that it attends to.

These keys are in a KV group of their own, and such a layer counts as two: its indexer, then its
attention. A query whose context has no more tokens than it may choose attends to all of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.common.model.attention_torch import TorchContext
from pdserve.common.model.hf.attention import Mask, running
from pdserve.common.model.latent import LatentBackend

AT_ONCE = 1 << 24  # float32 scores computed at a time


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a class computes queries and keys of its indexer."""

    name: str
    turn: str = "apply_rotary_pos_emb"  # the function that rotates a part of queries and keys
    last: bool = False  # whether the last part is rotated


INDEXERS = {
    "axk2": _Kind("AXK2Indexer"),
    "deepseek_v32": _Kind("DeepseekV32Indexer"),
    "dots3_note_text": _Kind("Dots3NoteTextIndexer", "apply_rotary_pos_emb_interleave"),
    "glm_moe_dsa": _Kind("GlmMoeDsaIndexer", "apply_rotary_pos_emb_interleave"),
    "hy_v4": _Kind("HYV4Indexer", last=True),
}
"""Model type → kind of indexer."""


@dataclass(frozen=True, slots=True)
class IndexInputs:
    """The inputs of an indexer for a step's T tokens."""

    q: Tensor  # [T, heads, D]
    k: Tensor  # [T, 1, D]
    weights: Tensor  # float32 [T, heads]
    scale: float  # factor of the scores
    count: int  # tokens that a query chooses

    def output(self) -> Tensor:
        """Returns an empty tensor for the positions of the chosen tokens."""
        return self.q.new_empty(1, len(self.q), self.count, dtype=torch.int64)


def take_indexers(model: Any) -> None:
    """Has the step compute the keys and choices of layers with an indexer."""
    if (kind := INDEXERS.get(model.config.model_type)) is None:
        return
    for net in list(model.modules()):
        if not hasattr(net, "kv_b_proj") or not hasattr(net, "indexer"):
            continue
        if net.indexer is not None:
            net.indexer.layer_idx = 2 * net.layer_idx
            net.indexer.forward = partial(_forward, net.indexer, kind)
            net.register_forward_pre_hook(_with_mask, with_kwargs=True)
        net.layer_idx = 2 * net.layer_idx + 1


def _with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Adds a mask that attention can slice, if transformers made none."""
    if kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": Mask()}
    return args, kwargs


def _forward(
    net: Any, kind: _Kind, hidden_states: Tensor, q_resid: Tensor, position_embeddings: Any,
    *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Returns `[1, T, count]` as `Answers.index`."""
    turned = net.qk_rope_head_dim
    sizes = (net.head_dim - turned, turned) if kind.last else (turned, net.head_dim - turned)
    q = net.wq_b(q_resid).unflatten(-1, (net.n_heads, net.head_dim)).split(sizes, dim=-1)
    k = net.k_norm(net.wk(hidden_states).to(net.k_norm.weight.dtype)).to(hidden_states.dtype)
    parts = k.unsqueeze(2).split(sizes, dim=-1)
    turn = getattr(sys.modules[type(net).__module__], kind.turn)
    of_q, of_k = turn(q[kind.last], parts[kind.last], *position_embeddings, unsqueeze_dim=2)
    order = (lambda a, b: (b, a)) if kind.last else (lambda a, b: (a, b))
    weights = net.weights_proj(hidden_states.to(net.weights_proj.weight.dtype)).float()
    inputs = IndexInputs(
        torch.cat(order(of_q, q[not kind.last]), dim=-1)[0],
        torch.cat(order(of_k, parts[not kind.last]), dim=-1)[0],
        (weights * net.n_heads**-0.5)[0],
        net.softmax_scale,
        net.index_topk,
    )
    return running().index(net.layer_idx, inputs)


class IndexBackend(LatentBackend):
    """Attends to latents; keeps the keys of indexers, and chooses by them."""

    def choose(self, inputs: IndexInputs, cache: Tensor, context: TorchContext) -> Tensor:
        """Writes the keys into a layer's `cache`; returns the positions of the tokens that each
        query attends to, int64 `[1, T, n]`, padded with -1; n = 0 if every query attends to all."""
        context.slots.write(cache, inputs.k)
        lengths = [each.length for each in context.decodes]
        lengths += [each.length for each in context.chunks]
        if max(lengths) <= inputs.count:
            return inputs.output()[..., :0]
        out = inputs.output().fill_(-1)[0]
        for group in context.decodes:
            keys = self.read(cache[0], group.gather, group.length)[:, 0]
            scores = _scores(inputs, group.rows, keys)
            mask = None if group.mask is None else group.mask[:, 0, 0]
            self._fill(out, group.rows, scores, mask)
        for chunk in context.chunks:
            if chunk.gather is None:
                keys = inputs.k[chunk.start : chunk.end].transpose(0, 1)
            else:
                keys = self.read(cache[0], chunk.gather, chunk.length)[0]
            mask = chunk.mask
            if mask is None:
                mask = self._mask(torch.arange(chunk.length), chunk.length)
            rows = torch.arange(chunk.start, chunk.end, device=self.device)
            some = max(1, AT_ONCE // (inputs.q.shape[1] * chunk.length))
            for these, hidden in zip(rows.split(some), mask.split(some), strict=True):
                self._fill(out, these, _scores(inputs, these, keys), hidden)
        return out[None]

    def _fill(self, out: Tensor, rows: Tensor, scores: Tensor, mask: Tensor | None) -> None:
        scores = scores if mask is None else scores + mask
        count = min(out.shape[1], scores.shape[1])
        out[rows, :count] = scores.topk(count, dim=-1).indices


def _scores(inputs: IndexInputs, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns the scores `[B, L]` of keys `[B or 1, L, D]`, float32."""
    q, weights = inputs.q[rows].float(), inputs.weights[rows]
    scores = F.relu(torch.matmul(q, keys.transpose(1, 2).float()) * inputs.scale)
    return torch.matmul(weights[:, None], scores)[:, 0]
