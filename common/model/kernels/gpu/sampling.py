"""Draws tokens from logits: top-k, temperature, top-p, min-p and the draw in one kernel, without
sorting.

A row is one program, which reads its logits again and again: a row of 152,000 words, 608 kB, stays
in the L2 cache. A filter keeps tokens from a threshold on, the largest one above which there are k
tokens, or the share p. The threshold is found by its bits, three with each reading: 11 readings for
top-k, 10 for top-p, and 4 for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.core.philox import MULTIPLIERS, WEYL
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.staging import upload

BLOCK = 2048  # logits that a program reads at once
_SMALLEST: tl.constexpr = tl.constexpr(-(2**31))  # keys of floats: int32 in the same order
_LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)
_ONE: tl.constexpr = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight
_MULTIPLIER0: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER1: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
_WEYL0: tl.constexpr = tl.constexpr(WEYL[0])
_WEYL1: tl.constexpr = tl.constexpr(WEYL[1])
_MAX_FLOAT: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


def draw(
    logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> Tensor:
    """Draws a token for each row; returns int64 `[B]`.

    Inverts the cumulative distribution: the first token at which it exceeds the row's random
    number. Sums are float32 within a block of logits, and float64 over blocks. A row does not
    depend on the others. NaN counts as minus infinity, infinity as the largest float; a row
    without any other gets any token of the vocabulary.

    Args:
        logits: `[B, vocab]` float32, contiguous; not modified.
        params: temperature, top_k, top_p and min_p of each row.
        keys: (seed, position) of each row, of up to 64 bits: the key of its random number.
    """
    rows, vocab = logits.shape
    numbers = [(p.temperature, p.top_p, p.min_p) for p in params]
    counts = [
        (min(max(p.top_k, 0), vocab), *map(_signed, key))
        for p, key in zip(params, keys, strict=True)
    ]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(
        _draw,
        (rows,),
        logits,
        upload(torch.tensor(numbers, dtype=torch.float32), logits.device),
        upload(torch.tensor(counts, dtype=torch.int64), logits.device),
        tokens,
        vocab,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return tokens


def _signed(word: int) -> int:
    """Returns the int64 with the lowest 64 bits of `word`."""
    word &= 2**64 - 1
    return word - 2**64 if word >> 63 else word


@triton.jit
def _draw(logits, numbers, counts, tokens, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    temperature = tl.load(numbers + 3 * row)
    top_p = tl.load(numbers + 3 * row + 1)
    min_p = tl.minimum(tl.load(numbers + 3 * row + 2), 1.0)
    top_k = tl.load(counts + 3 * row)
    number = _uniform(tl.load(counts + 3 * row + 1), tl.load(counts + 3 * row + 2))

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        largest = tl.maximum(largest, _read(logits, start, vocab, BLOCK))
    best = tl.max(largest, 0)
    least_key = _SMALLEST
    if (top_k > 0) & (top_k < vocab):
        least_key = _key_of_rank(logits, top_k.to(tl.int32), vocab, BLOCK)
    least_bits = 0
    if top_p < 1.0:
        whole = _total(logits, best, temperature, least_key, 0, min_p * 0.0, vocab, BLOCK)
        least_bits = _bits_of_share(
            logits, top_p * whole, best, temperature, least_key, vocab, BLOCK
        )

    # Both loops add up the same numbers in the same order, so that the second one passes `target`.
    whole = _total(logits, best, temperature, least_key, least_bits, min_p, vocab, BLOCK)
    target = number * whole
    sum_before = whole * 0.0
    reached = sum_before
    found = 0
    for start in range(0, vocab, BLOCK):
        x = _read(logits, start, vocab, BLOCK)
        part = _weights(x, best, temperature, least_key, least_bits, min_p)
        after = sum_before + tl.sum(part, 0).to(tl.float64)
        here = (sum_before <= target) & (after > target)
        found = tl.where(here, start, found)
        reached = tl.where(here, sum_before, reached)
        sum_before = after
    x = _read(logits, found, vocab, BLOCK)
    weights = _weights(x, best, temperature, least_key, least_bits, min_p)
    columns = found + tl.arange(0, BLOCK)
    cumulative = reached + tl.cumsum(weights.to(tl.float64), 0)
    passed = tl.min(tl.where((cumulative > target) & (weights > 0), columns, vocab), 0)
    # By rounding, the block's sum in float64 may be less than that in float32.
    last = tl.max(tl.where(weights > 0, columns, 0), 0)
    token = tl.where(passed < vocab, passed, last)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))  # a row of minus infinity


@triton.jit
def _uniform(seed, position):
    """Returns `philox.uniform`: a float64 in [0, 1) with 53 random bits."""
    a, b = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c, d = a * 0, a * 0
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(a, _MULTIPLIER0), a * _MULTIPLIER0
        high1, low1 = tl.umulhi(c, _MULTIPLIER1), c * _MULTIPLIER1
        a, b, c, d = high1 ^ b ^ k, low1, high0 ^ d ^ m, low0
        k, m = k + _WEYL0, m + _WEYL1
    bits = (a.to(tl.uint64) << 32) | b.to(tl.uint64)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _read(logits, start, vocab, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, columns < vocab, float("-inf"))
    return tl.where(x == x, tl.minimum(x, _MAX_FLOAT), float("-inf"))


@triton.jit
def _key(x):
    """Returns int32 in the order of the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(x, best, temperature, least_key, least_bits, min_p):
    """Returns e^((x - best) / temperature), 0 for what the filters drop; at most 1."""
    weights = tl.exp(tl.div_rn(x - best, tl.zeros_like(x) + temperature))
    weights = tl.where(x == best, 1.0, weights)  # for temperatures that a float32 rounds to 0
    kept = (_key(x) >= least_key) & (weights.to(tl.int32, bitcast=True) >= least_bits)
    return tl.where(kept & (weights >= min_p), weights, 0.0)  # NaN is dropped, too


@triton.jit
def _total(logits, best, temperature, least_key, least_bits, min_p, vocab, BLOCK: tl.constexpr):
    """Returns the float64 sum of all weights."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        x = _read(logits, start, vocab, BLOCK)
        weights = _weights(x, best, temperature, least_key, least_bits, min_p)
        total += tl.sum(weights, 0).to(tl.float64)
    return total


@triton.jit
def _key_of_rank(logits, rank, vocab, BLOCK: tl.constexpr):
    """Returns the key of the logit with `rank - 1` larger ones: the largest key that at least
    `rank` logits reach."""
    low = tl.full([], _SMALLEST, tl.int64)
    for step in range(11):
        shift = 30 - 3 * step
        pivots = low + (tl.arange(0, 8).to(tl.int64) << shift)
        pivots = tl.minimum(pivots, _LARGEST).to(tl.int32)  # which no number reaches
        counts = tl.zeros([BLOCK, 8], tl.int32)
        for start in range(0, vocab, BLOCK):
            keys = _key(_read(logits, start, vocab, BLOCK))
            counts += (keys[:, None] >= pivots[None, :]).to(tl.int32)
        passed = tl.sum((tl.sum(counts, 0) >= rank).to(tl.int64), 0)
        low += tl.maximum(passed - 1, 0) << shift
    return low.to(tl.int32)


@triton.jit
def _bits_of_share(logits, share, best, temperature, least_key, vocab, BLOCK: tl.constexpr):
    """Returns the bits of the largest weight such that those at least as large sum to `share`."""
    low = tl.zeros([], tl.int32)
    for step in range(10):
        shift = 27 - 3 * step
        pivots = low + (tl.arange(0, 8) << shift)
        sums = tl.zeros([BLOCK, 8], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _read(logits, start, vocab, BLOCK)
            weights = _weights(x, best, temperature, least_key, 0, 0.0)
            bits = weights.to(tl.int32, bitcast=True)
            sums += tl.where(bits[:, None] >= pivots[None, :], weights[:, None], 0.0)
        passed = tl.sum((tl.sum(sums.to(tl.float64), 0) >= share).to(tl.int32), 0)
        low += tl.maximum(passed - 1, 0) << shift
    return tl.minimum(low, _ONE)
