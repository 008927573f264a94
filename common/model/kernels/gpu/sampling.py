"""Draws tokens from logits: top-k, temperature, top-p, min-p and the draw, without a sort.

    tally × 3 ─▶ top-k's floor ─▶ tally × 3 ─▶ top-p's floor ─▶ weigh ─▶ pick

All filters keep the tokens from some logit on, so tokens with the last one's logit stay too. A
floor is found digit by digit, as in a radix select: a launch adds up what the tokens have per value
of a digit of their key (an integer in the logits' order), and the next launch finds the digit from
these sums. Top-k adds up tokens, top-p their weights. A CPU compares probabilities, which float64
rounds: there logits that differ by less than 1e-16 of the temperature are equal.

Weights are integers, floor(exp((logit - largest) / temperature) · 2^44) for 152k words. So sums do
not depend on the order of additions: a row's token depends on no other row, and the atomic
additions of many programs give the same sums each time. A token is lost to the draw if it is less
than 2^-44 times as likely as the most likely one; all together they have less than 1e-8.

A row is divided among programs of `BLOCK` tokens, because one multiprocessor would need, for 152k
words, some 10 µs each time it read the row (estimated from an L2 cache's bandwidth per
multiprocessor; nothing was measured).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.staging import upload

BLOCK = 4096  # tokens of a program
BINS = 2048  # values of a digit: a key has digits of 11, 11 and 10 bits
DIGITS = 3
WARPS = 8
COLDEST, HOTTEST = 1.2e-37, 3e38  # temperatures within which float32 divides without flushing

_COLUMNS: tl.constexpr = tl.constexpr(6)  # of `numbers`, as `Draw` has them
_STATE: tl.constexpr = tl.constexpr(4)  # numbers of a row in `found`: floor, prefix, need; aligned
_BINS: tl.constexpr = tl.constexpr(BINS)


@dataclass(frozen=True, slots=True)
class Draw:
    """A row's parameters and the key of its random number. Any float is taken: a temperature is
    brought within `COLDEST` and `HOTTEST`, and a filter that makes no sense does not filter."""

    temperature: float
    top_k: int  # 0: all
    top_p: float
    min_p: float
    seed: int  # of up to 64 bits, as `position`
    position: int

    @property
    def floats(self) -> tuple[float, float, float]:
        """Half the temperature, top-p, and the least logarithm of a probability ratio."""
        half = min(max(COLDEST, self.temperature), HOTTEST) / 2  # NaN: the coldest
        share = max(self.top_p, 0.0) if self.top_p < 1 else 1.0
        return half, share, math.log(min(self.min_p, 1.0)) if self.min_p > 0 else -math.inf

    def integers(self, vocab: int) -> tuple[int, int, int]:
        """The number of tokens that top-k keeps, and the words of seed and position."""
        kept = self.top_k if 0 < self.top_k < vocab else vocab
        return kept, _signed(self.seed), _signed(self.position)


def _signed(word: int) -> int:
    """Returns the int64 with the bits of a 64-bit word."""
    return (word + 2**63) % 2**64 - 2**63


def draw_tokens(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Draws a token per row of `scores`, float32 `[B, vocab]`: logits, of which -infinity forbids a
    token. Rows with NaN and rows of -infinity give any token, which is not allowed.

    The token is the first, in the vocabulary's order, whose cumulative weight exceeds the row's
    random number (`common/worker/philox.py`) times the sum.

    Returns:
        tokens, int64 `[B]`, and whether each is allowed, bool `[B]`; the host waits for neither.
    """
    count, vocab = scores.shape
    if len(draws) != count:
        raise ValueError(f"{count} rows, but {len(draws)} draws")
    if count == 0:
        return scores.new_empty(0, dtype=torch.int64), scores.new_empty(0, dtype=torch.bool)
    scores, best = scores.contiguous(), scores.amax(dim=-1)
    numbers = upload(_packed(draws, vocab), scores.device)
    steps = [*_steps(draws, vocab)]
    bins = numbers.new_zeros(max(len(steps), 1), count, BINS)
    found = numbers.new_empty(len(steps) + 1, count, _STATE.value)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    slices = triton.cdiv(vocab, block)
    sizes = {"VOCAB": vocab, "BLOCK": block, "ONE": 2.0 ** (62 - vocab.bit_length())}
    row = scores, best, numbers
    before = _Step(False, -1)
    for at, step in enumerate(steps):
        last = max(at - 1, 0)
        tensors = *row, found[last], bins[last], found[at], bins[at]
        which = {"BY_WEIGHT": step.by_weight, "DIGIT": step.digit}
        launch(
            _tally, (count, slices), *tensors, **which, **before.constants, **sizes, num_warps=WARPS
        )
        before = step
    last = max(len(steps) - 1, 0)
    masses = numbers.new_empty(count, slices)
    tensors = *row, found[last], bins[last], found[len(steps)], masses
    launch(_weigh, (count, slices), *tensors, **before.constants, **sizes, num_warps=WARPS)
    tokens = numbers.new_empty(count)
    allowed = torch.empty(count, dtype=torch.bool, device=scores.device)
    padded = triton.next_power_of_2(slices)
    ends = found[len(steps)], masses, tokens, allowed
    constants = {"SLICES": slices, "PADDED": padded, **sizes}
    launch(_pick, (count,), *row, *ends, **constants, num_warps=WARPS)
    return tokens, allowed


def warm_up(vocab: int, device: torch.device) -> None:
    """Compiles all kernels that `draw_tokens` launches for a vocabulary. Only the filters that a
    batch has choose among them, since no kernel is passed an integer, and all tensors are aligned
    however many rows there are."""
    scores = torch.zeros(1, vocab, device=device)
    for top_k in (0, 1):
        for top_p in (1.0, 0.5):
            draw_tokens(scores, [Draw(1.0, top_k, top_p, 0.0, 0, 0)])


@dataclass(frozen=True, slots=True)
class _Step:
    """The search for one digit of a floor."""

    by_weight: bool
    digit: int  # -1: no search was before

    @property
    def constants(self) -> dict[str, int]:
        return {"WEIGHED_BEFORE": self.by_weight, "DIGIT_BEFORE": self.digit}


def _steps(draws: Sequence[Draw], vocab: int) -> Iterator[_Step]:
    searches = (
        any(0 < each.top_k < vocab for each in draws),
        any(each.top_p < 1 for each in draws),
    )
    for by_weight, needed in enumerate(searches):
        for digit in range(DIGITS * needed):
            yield _Step(bool(by_weight), digit)


def _packed(draws: Sequence[Draw], vocab: int) -> Tensor:
    """Returns `[B, 6]` int64, so that one copy uploads all; floats as the bits of float64."""
    floats = torch.tensor([each.floats for each in draws], dtype=torch.float64).view(-1, 3)
    integers = torch.tensor([each.integers(vocab) for each in draws], dtype=torch.int64)
    return torch.cat((floats.view(torch.int64), integers.view(-1, 3)), dim=1)


# ---- kernels: `row` is int64, since a batch may have more than 2^31 logits ----


@triton.jit
def _tally(
    scores,
    best,
    numbers,
    found_before,
    bins_before,
    found,
    bins,
    BY_WEIGHT: tl.constexpr,
    DIGIT: tl.constexpr,
    WEIGHED_BEFORE: tl.constexpr,
    DIGIT_BEFORE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Adds up tokens or weights per value of a digit, of keys with the digits found before."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.full((), 0, tl.int64)
    prefix = tl.full((), 0, tl.int64)
    need = tl.load(numbers + row * _COLUMNS + 3)
    if DIGIT_BEFORE >= 0:
        floor, prefix, need = _narrowed(
            numbers, found_before, bins_before, row, WEIGHED_BEFORE, DIGIT_BEFORE
        )
        if DIGIT == 0:  # top-k's floor is found
            floor = prefix
            prefix = tl.full((), 0, tl.int64)
    if tl.program_id(1) == 0:
        tl.store(found + row * _STATE, floor)
        tl.store(found + row * _STATE + 1, prefix)
        tl.store(found + row * _STATE + 2, need)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + columns, columns < VOCAB, -float("inf"))
    key = _key(score)
    counted = (columns < VOCAB) & (key >= floor)
    bits: tl.constexpr = 10 if DIGIT == 2 else 11
    shift: tl.constexpr = 21 if DIGIT == 0 else 10 if DIGIT == 1 else 0
    counted = counted & ((key >> (shift + bits)) == prefix)
    digit = (key >> shift) & (2**bits - 1)
    if BY_WEIGHT:
        amount = _weight(_logarithm(score, best, numbers, row), ONE)
        counted = counted & (amount > 0)
    else:
        amount = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(bins + row * _BINS + (2**bits - 1 - digit), amount, counted, sem="relaxed")


@triton.jit
def _weigh(
    scores,
    best,
    numbers,
    found_before,
    bins_before,
    found,
    masses,
    WEIGHED_BEFORE: tl.constexpr,
    DIGIT_BEFORE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Adds up the weights of a block's tokens that are kept, and stores the row's floor."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.full((), 0, tl.int64)
    if DIGIT_BEFORE >= 0:
        _, floor, _ = _narrowed(
            numbers, found_before, bins_before, row, WEIGHED_BEFORE, DIGIT_BEFORE
        )
    if tl.program_id(1) == 0:
        tl.store(found + row * _STATE, floor)
    weight = _kept(scores, best, numbers, row, tl.program_id(1), floor, VOCAB, BLOCK, ONE)
    tl.store(masses + row * tl.num_programs(1) + tl.program_id(1), tl.sum(weight, 0))


@triton.jit
def _pick(
    scores,
    best,
    numbers,
    found,
    masses,
    tokens,
    allowed,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Finds the block, and in it the token, at which the cumulative weight exceeds the number."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    mass = tl.load(masses + row * SLICES + place, place < SLICES, 0)
    total = tl.sum(mass, 0)
    # floor(number · total): a cumulative weight exceeds that if it exceeds the product.
    word = _random_bits(
        tl.load(numbers + row * _COLUMNS + 4), tl.load(numbers + row * _COLUMNS + 5)
    )
    target = tl.umulhi(word, total.to(tl.uint64)).to(tl.int64)
    at = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0), SLICES - 1)
    target -= tl.sum(tl.where(place < at, mass, 0), 0)
    floor = tl.load(found + row * _STATE)
    weight = _kept(scores, best, numbers, row, at, floor, VOCAB, BLOCK, ONE)
    token = at * BLOCK + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.minimum(token, VOCAB - 1).to(tl.int64))
    tl.store(allowed + row, total > 0)


@triton.jit
def _narrowed(numbers, found, bins, row, BY_WEIGHT: tl.constexpr, DIGIT: tl.constexpr):
    """Returns the floor before this search; the digits found so far; and what the tokens that have
    these need to add up to."""
    bits: tl.constexpr = 10 if DIGIT == 2 else 11
    floor = tl.load(found + row * _STATE)
    prefix = tl.load(found + row * _STATE + 1)
    need = tl.load(found + row * _STATE + 2)
    place = tl.arange(0, 2**bits)  # of digits, descending
    amount = tl.load(bins + row * _BINS + place)
    if BY_WEIGHT and DIGIT == 0:
        total = tl.sum(amount, 0)
        share = tl.load(numbers + row * _COLUMNS + 1).to(tl.float64, bitcast=True)
        need = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
        need = tl.minimum(tl.maximum(need, 1), total)
    at = tl.sum((tl.cumsum(amount, 0) < need).to(tl.int64), 0)
    at = tl.minimum(at, 2**bits - 1)
    need -= tl.sum(tl.where(place < at, amount, 0), 0)
    return floor, (prefix << bits) + (2**bits - 1 - at), need


@triton.jit
def _kept(
    scores,
    best,
    numbers,
    row,
    block,
    floor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Returns the weights of a block's tokens, int64: 0 of those that a filter takes away."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + columns, columns < VOCAB, -float("inf"))
    logarithm = _logarithm(score, best, numbers, row)
    least = tl.load(numbers + row * _COLUMNS + 2).to(tl.float64, bitcast=True).to(tl.float32)
    kept = (_key(score) >= floor) & (logarithm >= least)
    return tl.where(kept, _weight(logarithm, ONE), 0)


@triton.jit
def _key(score):
    """Returns 32 bits, as int64, in the order of float32 scores; the zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _logarithm(score, best, numbers, row):
    """Returns (score - best) / temperature; from halves, since the difference may overflow."""
    half = tl.load(numbers + row * _COLUMNS).to(tl.float64, bitcast=True).to(tl.float32)
    return (score * 0.5 - tl.load(best + row) * 0.5) / half


@triton.jit
def _weight(logarithm, ONE: tl.constexpr):
    """Returns the integer weight, 0 for NaN; `ONE` is the most likely token's."""
    return tl.where(logarithm <= 0.0, tl.exp(logarithm) * ONE, 0.0).to(tl.int64)


@triton.jit
def _random_bits(seed, position):
    """Returns 53 random bits from the top of a uint64 (Philox4x32-10, Salmon et al., SC 2011). Not
    by Triton's function, which the interpreter cannot call."""
    c0, c1 = _word(position), _word(position >> 32)
    k0, k1 = _word(seed), _word(seed >> 32)
    c2 = tl.full((), 0, tl.uint32)
    c3 = tl.full((), 0, tl.uint32)
    left = tl.full((), 0xD2511F53, tl.uint32)
    right = tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(left, c0), left * c0
        high1, low1 = tl.umulhi(right, c2), right * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return ((c0.to(tl.uint64) << 32) | c1.to(tl.uint64)) & 0xFFFFFFFFFFFFF800


@triton.jit
def _word(bits):
    return (bits & 0xFFFFFFFF).to(tl.uint32)
