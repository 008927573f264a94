"""The attention of transformers' models over the paged cache.

A model built with `attn_implementation=NAME` calls `attend` in each layer, with queries, keys and
values after the rotation, and the step's `Answers` compute it over the cache. A model that is only
described (`describe.py`) is built with `OUTLINE`; its masks state what each layer attends to.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pdserve.common.core.latent_spec import LatentSpec
from pdserve.common.model.attention_torch import TorchAttention, TorchContext
from pdserve.common.model.delta_net import StateInputs
from pdserve.common.model.hf.latents import latent_of, up_projection

NAME, OUTLINE = "pdserve", "pdserve_outline"
MASK = "its attention has a mask or bias of its own"


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for an attention mask. Indexing returns the same mask."""

    window: int | None = None  # tokens that a query attends to, itself included; None: all
    chunked: bool = False  # attends to its own chunk of `window` tokens instead
    oddity: str = ""  # the reason if the paged cache does not support it

    def __getitem__(self, _: Any) -> Mask:
        return self


def outline_mask(
    config: Any, local_size: int | None = None, use_vmap: bool = False, **options: Any
) -> Mask:
    """Implements transformers' mask interface."""
    if "allow_is_bidirectional_skip" in options:
        return Mask(oddity="its attention is not causal")
    if use_vmap:  # a function of the class's own takes part
        return Mask(oddity=MASK)
    chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
    return Mask(local_size, chunked)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Scales queries by their positions: `1 + scale · log(1 + ⌊(position + 1) / floor⌋)`
    (Llama 4; arXiv:2501.19399)."""

    scale: float
    floor: float

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """q `[T, heads, D]`, positions `[T]`."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        return (q * (torch.log1p(steps) * self.scale + 1.0)[:, None, None]).to(q.dtype)


@dataclass(frozen=True, slots=True)
class Style:
    """The variant of attention that a layer computes."""

    scale: float
    mask: Mask
    softcap: float | None = None  # scores become `softcap · tanh(score / softcap)` (Gemma 2)
    sinks: Tensor | None = None  # [heads]: a score in the softmax that has no value
    temperature: Temperature | None = None
    slopes: tuple[float, ...] | None = None
    """[heads]: a key adds `slope · its position` to its score (ALiBi)."""
    chosen: Tensor | None = None  # [1, T, n]: the result of `Answers.index`
    latent: LatentSpec | None = None
    """Keys are latents of one head, values a part of them; `up` computes those of all heads."""
    up: Tensor | None = None  # [heads, nope_dim + value_dim, kv_rank]

    def output(self, q: Tensor, v: Tensor) -> Tensor:
        """Returns an empty tensor for the result."""
        size = v.shape[3] if self.latent is None else self.latent.value_dim
        return q.new_empty(1, q.shape[2], q.shape[1], size)


class Answers(ABC):
    """Computes the layers' attention, states and adapters while a model runs."""

    positions: Tensor  # [T] of the tokens

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        """q `[1, heads, T, D]`, k `[1, kv_heads, T, D]`, v `[1, kv_heads, T, Dv]` →
        `[1, T, heads, Dv]`. A layer that shares another layer's KV gets the same `k`."""

    @abstractmethod
    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        """Computes a layer with a delta net or Mamba-2; returns `[T, features]`."""

    @abstractmethod
    def index(self, layer: int, inputs: Any) -> Tensor:
        """Returns the tokens that each query of a layer attends to, by `indexers.IndexInputs`:
        their positions in the sequence, int64 `[1, T, n]`, -1: none; n = 0: all tokens."""

    @abstractmethod
    def mix(self, mixer: Any, hidden: Tensor) -> Tensor:
        """Computes a layer with other states (`mixers.Mixer`): `[1, T, size]` → `[1, T, size]`."""

    def adapt(self, linear: str, x: Tensor, y: Tensor) -> None:  # noqa: B027  # there may be none
        """Adds the LoRA adapters' product with a linear layer's input to its output, in place."""


class _Running(threading.local):
    answers: Answers | None = None


_running = _Running()


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Has `answers` compute the attention of models that run on this thread."""
    _running.answers = answers
    try:
        yield
    finally:
        _running.answers = None


def running() -> Answers:
    """Returns the `Answers` of the model that runs on this thread."""
    assert _running.answers is not None, "a model runs within `answering`"
    return _running.answers


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    slopes: tuple[float, ...] | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: `[1, heads, T, D]` → `[1, T, heads, Dv]`."""
    if isinstance(attention_mask, Mask) and position_bias is None:
        mask = attention_mask
    elif attention_mask is not None or position_bias is not None:
        mask = Mask(oddity=MASK)
    elif not getattr(module, "is_causal", True):
        mask = Mask(oddity="its attention is not causal")
    else:
        mask = Mask(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    temperature = getattr(module, "temperature", None)
    latent = latent_of(module, scale)
    if latent is not None and (softcap, temperature, slopes) != (None, None, None):
        mask = Mask(oddity="its scores of latents have a soft cap, ALiBi or a temperature")
    up = None if latent is None else up_projection(module, latent)
    style = Style(scale, mask, softcap, s_aux, temperature, slopes, indices, latent, up)
    return running().attend(module.layer_idx, query, key, value, style), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, attend)
AttentionInterface.register(OUTLINE, attend)
AttentionMaskInterface.register(OUTLINE, outline_mask)


def take_temperatures(model: nn.Module) -> None:
    """Leaves the scaling of queries by position to the step: layers of Llama 4 would count the
    tokens of one sequence, and a step has several sequences."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            layer: Any = module
            layer.attn_temperature_tuning = False
            if not layer.use_rope:
                layer.temperature = Temperature(layer.attn_scale, layer.floor_scale)


class StyledAttention(TorchAttention):
    """Attention in plain torch over the cache of one KV group, in the style of each call. Values
    shorter than keys are stored with zero padding."""

    def attend_styled(
        self, q: Tensor, k: Tensor, v: Tensor, style: Style,
        cache: Tensor, context: TorchContext, stores: bool,
    ) -> Tensor:  # fmt: skip
        """Writes `k` and `v` into a layer's `cache` if it `stores` them, and attends: q
        `[T, heads, D]`, k `[T, kv_heads, D]`, v `[T, kv_heads, Dv]` → `[T, heads, Dv]`."""
        dim, size = self.shape.head_dim, v.shape[2]
        q, k, v = (F.pad(each, (0, dim - each.shape[2])) for each in (q, k, v))
        if stores:
            context.slots.write(cache, k, v)
        out = torch.empty_like(q)
        kv_heads = self.shape.num_kv_heads
        for group in context.decodes:
            keys, values = (self.read(plane, group.gather, group.length) for plane in cache)
            queries = q[group.rows].view(len(group.rows), kv_heads, -1, dim)
            sinks = None if style.sinks is None else style.sinks.view(kv_heads, -1, 1)
            mask = self._biased(group.mask, group.length, style)
            found = _attention(queries, keys, values, mask, style, sinks)
            out[group.rows] = found.reshape(len(group.rows), -1, dim)
        for chunk in context.chunks:
            rows = slice(chunk.start, chunk.end)
            queries = q[rows].view(chunk.end - chunk.start, kv_heads, -1, dim).permute(1, 2, 0, 3)
            if chunk.gather is None:
                keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            else:
                keys, values = (self.read(plane, chunk.gather, chunk.length)[0] for plane in cache)
            mask = chunk.mask
            if mask is None:
                mask = self._mask(torch.arange(chunk.length), chunk.length)
            if (biased := self._biased(None, chunk.length, style)) is not None:
                mask = mask + biased[:, :, None]
            sinks = None if style.sinks is None else style.sinks.view(kv_heads, -1, 1, 1)
            found = _attention(queries, keys[:, None], values[:, None], mask, style, sinks)
            out[rows] = found.permute(2, 0, 1, 3).reshape(chunk.end - chunk.start, -1, dim)
        return out[..., :size]

    def _biased(self, mask: Tensor | None, length: int, style: Style) -> Tensor | None:
        """Adds ALiBi's bias, float32 `[kv_heads, G, length]`, to a mask `[B, 1, 1, length]`."""
        if style.slopes is None:
            return mask
        slopes = torch.tensor(style.slopes, device=self.device).view(self.shape.num_kv_heads, -1, 1)
        bias = slopes * torch.arange(1 - length, 1, device=self.device)
        return bias if mask is None else mask + bias


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, style: Style, sinks: Tensor | None
) -> Tensor:
    """`[…, Q, D] × […, L, D] → […, Q, D]`; k and v may have leading sizes of 1. `mask` is added to
    the scores."""
    if style.softcap is None and sinks is None and style.slopes is None:
        shape = (*q.shape[:-2], *k.shape[-2:])
        return F.scaled_dot_product_attention(
            q, k.expand(shape), v.expand(shape), attn_mask=mask, scale=style.scale
        )
    scores = (q @ k.transpose(-1, -2)) * style.scale
    if style.softcap is not None:
        scores = torch.tanh(scores / style.softcap) * style.softcap
    if mask is not None:
        scores = scores + mask
    length = scores.shape[-1]
    if sinks is not None:
        ends = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, ends), dim=-1)
    return scores.softmax(-1, dtype=torch.float32)[..., :length].to(v.dtype) @ v
