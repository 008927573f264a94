"""Prepares a layer's QKV for attention, in one kernel instead of eight: norms of the heads, rotary
embedding (arXiv:2104.09864), and the new keys and values in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.model.attention import SlotMapping
from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles

TILE = 4  # heads of a program


def attention_input(
    qkv: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    angles: Angles | None,
    layer_cache: Tensor,
    slots: SlotMapping,
) -> Tensor:
    """Norms and rotates the queries and keys in `qkv`, writes keys and values into the cache, and
    returns the queries `[T, heads, D]`.

    Products and sums of the rotation round to the dtype one by one, as in torch; so only norms may
    differ from torch's, in the last bit. Blocks that the step starts to fill hold zeros after its
    last token, as after `SlotMapping.write`; `slots.fresh` is not read.

    Args:
        qkv: `[T, heads + 2 · kv_heads, D]`, D even; tokens of a sequence follow each other.
        norms: of queries and keys; None: they have none.
        angles: None: no rotation.
        layer_cache: contiguous `[2, N, kv_heads, S, D]` in the dtype of `qkv`.
        slots: int64; no two tokens have the same, except in a block that no sequence reads.

    Raises:
        ValueError: the cache is not contiguous, or has another dtype or head size.
    """
    tokens, count, dim = qkv.shape
    _, _, kv_heads, block_size, size = layer_cache.shape
    if not layer_cache.is_contiguous() or (layer_cache.dtype, size) != (qkv.dtype, dim):
        raise ValueError(f"the cache's rows are not {dim} contiguous numbers of {qkv.dtype}")
    heads = count - 2 * kv_heads
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
    epsilons = (0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)
    turns = (None, None) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    launch(
        _attention_input, (tokens, triton.cdiv(count, TILE)), qkv.contiguous(), *weights, *turns,
        slots.blocks, slots.slots, q, *layer_cache.unbind(), tokens, *epsilons, HEADS=heads,
        KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=block_size, TILE=TILE,
        COLUMNS=triton.next_power_of_2(dim // 2), num_warps=2,
    )  # fmt: skip
    return q


# Slots are parts of larger tensors, at any address.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["blocks", "slots"])
def _attention_input(
    qkv, q_weight, k_weight, cos, sin, blocks, slots, q, keys, values, tokens, q_eps, k_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, COLUMNS)
    is_query, is_value = heads < HEADS, heads >= HEADS + KV_HEADS
    exists = columns < HALF
    inside = (heads < ALL)[:, None] & exists
    rows = qkv + (token * ALL + heads)[:, None] * DIM + columns
    left = tl.load(rows, inside, 0.0)
    right = tl.load(rows + HALF, inside, 0.0)

    if q_weight is not None:
        left, right = _normed(
            left, right, q_weight, k_weight, q_eps, k_eps, is_query, is_value, columns, exists,
            DIM, HALF,
        )  # fmt: skip
    if cos is not None:
        left, right = _turned(left, right, cos, sin, is_value, token * HALF + columns, exists)

    out = q + (token * HEADS + heads)[:, None] * DIM + columns
    mine = inside & is_query[:, None]
    tl.store(out, left, mine)
    tl.store(out + HALF, right, mine)

    block, slot = tl.load(blocks + token), tl.load(slots + token)
    kv_head = heads - HEADS - tl.where(is_value, KV_HEADS, 0)
    own = ((block * KV_HEADS + kv_head) * BLOCK_SIZE)[:, None] * DIM + columns  # slot 0
    of_keys = inside & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
    of_values = inside & is_value[:, None]
    _store(keys, values, own + slot * DIM, left, right, of_keys, of_values, HALF)

    # If the step also wrote the block's first slot, the program of its last token here zeroes what
    # follows. No other program writes there.
    following = tl.load(blocks + token + 1, token + 1 < tokens, -1)
    first = token - slot
    began = tl.load(blocks + first, first >= 0, -1)
    if (following != block) & (began == block):
        zeros = tl.zeros_like(left)
        for each in range(slot + 1, BLOCK_SIZE):
            _store(keys, values, own + each * DIM, zeros, zeros, of_keys, of_values, HALF)


@triton.jit
def _normed(
    left, right, q_weight, k_weight, q_eps, k_eps, is_query, is_value, columns, exists,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norms the rows of queries and keys."""
    first, second = left.to(tl.float32), right.to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)
    scale = tl.rsqrt(squares / DIM + tl.where(is_query, q_eps, k_eps))[:, None]
    of_queries, raw = is_query[:, None], is_value[:, None]
    factors = tl.where(
        of_queries,
        tl.load(q_weight + columns, exists, 0.0),
        tl.load(k_weight + columns, exists, 0.0),
    )
    left = tl.where(raw, left, (first * scale * factors.to(tl.float32)).to(left.dtype))
    factors = tl.where(
        of_queries,
        tl.load(q_weight + HALF + columns, exists, 0.0),
        tl.load(k_weight + HALF + columns, exists, 0.0),
    )
    right = tl.where(raw, right, (second * scale * factors.to(tl.float32)).to(right.dtype))
    return left, right


@triton.jit
def _turned(left, right, cos, sin, is_value, places, exists):
    """Rotates the rows of queries and keys, rounding after each operation."""
    c = tl.load(cos + places, exists, 0.0).to(tl.float32)
    s = tl.load(sin + places, exists, 0.0).to(tl.float32)
    first, second = left.to(tl.float32), right.to(tl.float32)
    x, y = _rounded(first * c, left), _rounded(second * s, left)
    z, w = _rounded(second * c, left), _rounded(first * s, left)
    raw = is_value[:, None]
    turned = tl.where(raw, left, (x - y).to(left.dtype))
    return turned, tl.where(raw, right, (z + w).to(left.dtype))


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _store(keys, values, places, left, right, of_keys, of_values, HALF: tl.constexpr):
    tl.store(keys + places, left, of_keys)
    tl.store(keys + places + HALF, right, of_keys)
    tl.store(values + places, left, of_values)
    tl.store(values + places + HALF, right, of_values)
