"""Has transformers layers with attention code of their own attend through the step, like those that
use the attention interface."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.hf.attention import NAME, OUTLINE, Mask, attend

_TABLES = {
    "falcon": "falcon.modeling_falcon:FALCON_ATTENTION_CLASSES",
    "gpt_neo": "gpt_neo.modeling_gpt_neo:GPT_NEO_ATTENTION_CLASSES",
}
"""Tables in which classes look up their attention code by name."""


def list_attentions(config: Any) -> None:
    """Registers our names in these tables before a class is built. Raises ConfigError for a class
    whose attention is not supported."""
    if getattr(config, "alibi", False) and config.model_type == "falcon":
        raise ConfigError("Falcon's ALiBi is rounded to bfloat16, which is not supported")
    if (place := _TABLES.get(config.model_type)) is not None:
        file, _, name = place.partition(":")
        table = getattr(importlib.import_module(f"transformers.models.{file}"), name)
        table.update({NAME: table["eager"], OUTLINE: table["eager"]})


def take_attention(model: Any) -> bool:
    """Replaces the attention code of such layers. Returns whether their scores depend on positions
    (ALiBi), in which case the class needs no positions."""
    kind = model.config.model_type
    if kind not in _OWN:
        return False
    name, method, instead = _OWN[kind]
    for layer, net in enumerate(each for each in model.modules() if type(each).__name__ == name):
        if not hasattr(net, "layer_idx"):
            net.layer_idx = layer
        setattr(net, method, partial(instead, net))
    if kind == "mpt":  # which modifies masks, unless they have four dimensions
        model.transformer.register_forward_pre_hook(_given_mask, with_kwargs=True)
        model.transformer.build_mpt_alibi_tensor = lambda *_, **__: None
    return kind in ("bloom", "mpt")


def slopes(heads: int, bias_max: float = 8) -> tuple[float, ...]:
    """Returns ALiBi's slopes (arXiv:2108.12409) of `heads`."""
    count = 1 << math.ceil(math.log2(heads))
    found = [2.0 ** (-bias_max * (i + 1) / count) for i in range(count)]
    return tuple(found if count == heads else (found[1::2] + found[::2])[:heads])


def _given_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "attention_mask": torch.ones(1, 1, 1, 1)}


def _attended(net: nn.Module, qkv: Sequence[Tensor], mask: Any, **style: Any) -> Tensor:
    """Causal attention: q, k, v `[1, heads, T, D]` → `[1, T, heads, D]`."""
    q, k, v = qkv
    return attend(net, q, k, v, mask if isinstance(mask, Mask) else None, **style)[0]


def _heads(x: Tensor, dim: int) -> Tensor:
    """`[1, T, heads · D]` → `[1, heads, T, D]`."""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


# ---- classes whose method `_attn` computes the scores; same arguments and results ----


def _gpt_neo(net: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    window = net.config.window_size if net.attention_type == "local" else None
    found = _attended(net, (q, k, v), None, scaling=1.0, sliding_window=window)
    return found.transpose(1, 2), None


def _gpt_neox_japanese(
    net: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    return _attended(net, (q, k, v), mask).transpose(1, 2), None


def _openai_gpt(net: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [_attended(net, (q, k.transpose(2, 3), v), None).transpose(1, 2)]


# ---- classes whose `forward` computes the scores ----


def _bert(
    net: Any, hidden_states: Tensor, attention_mask: Any = None, *_: Any, **others: Any
) -> tuple[Tensor, None]:
    products = (each(hidden_states) for each in (net.query, net.key, net.value))
    q, k, v = (_heads(each, net.attention_head_size) for each in products)
    if hasattr(net, "rotary_value"):  # RoFormer
        given = (q, k, v) if net.rotary_value else (q, k)
        turned = net.apply_rotary_position_embeddings(others["sinusoidal_pos"], *given)
        q, k, v = (*turned, v)[:3]
    return _attended(net, (q, k, v), attention_mask).flatten(2), None


def _bart(
    net: Any, hidden_states: Tensor, attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    products = (each(hidden_states) for each in (net.q_proj, net.k_proj, net.v_proj))
    heads = [_heads(each, net.head_dim) for each in products]
    found = _attended(net, heads, attention_mask, scaling=net.scaling)
    return net.out_proj(found.flatten(2)), None


def _bloom(
    net: Any, hidden_states: Tensor, residual: Tensor, attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    heads = net._reshape(net.query_key_value(hidden_states))
    found = _attended(net, heads, attention_mask, slopes=slopes(net.num_heads))
    return residual + net.dense(found.flatten(2)), None


def _mpt(net: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    product = net.Wqkv(hidden_states)
    if net.clip_qkv:
        product = product.clamp(min=-net.clip_qkv, max=net.clip_qkv)
    heads = [_heads(each, net.head_dim) for each in product.chunk(3, dim=2)]
    found = _attended(net, heads, None, scaling=net.softmax_scale, slopes=slopes(net.n_heads))
    return net.out_proj(found.flatten(2)), None


def _falcon(
    net: Any,
    hidden_states: Tensor,
    alibi: None,
    attention_mask: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    product = net.query_key_value(hidden_states)
    if net.new_decoder_architecture:  # groups of queries, each followed by a key and a value
        share = net.num_heads // net.num_kv_heads
        product = product.unflatten(-1, (net.num_kv_heads, share + 2, net.head_dim))
        parts = product.split((share, 1, 1), dim=3)
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in parts)
    else:
        q, k, v = (each.transpose(1, 2) for each in net._split_heads(product))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    return net.dense(_attended(net, (q, k, v), attention_mask).flatten(2)), None


_OWN: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "big_bird": ("BigBirdSelfAttention", "forward", _bert),
    "bloom": ("BloomAttention", "forward", _bloom),
    "falcon": ("FalconAttention", "forward", _falcon),
    "gpt_neo": ("GPTNeoSelfAttention", "_attn", _gpt_neo),
    "gpt_neox_japanese": ("GPTNeoXJapaneseAttention", "_attn", _gpt_neox_japanese),
    "megatron-bert": ("MegatronBertSelfAttention", "forward", _bert),
    "mpt": ("MptAttention", "forward", _mpt),
    "mvp": ("MvpAttention", "forward", _bart),
    "openai-gpt": ("Attention", "_attn", _openai_gpt),
    "rembert": ("RemBertSelfAttention", "forward", _bert),
    "roformer": ("RoFormerSelfAttention", "forward", _bert),
    "trocr": ("TrOCRAttention", "forward", _bart),
    "xglm": ("XGLMAttention", "forward", _bart),
}
"""Model type → (class of its attention, method, replacement)."""
