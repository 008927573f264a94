"""The kernels that draw tokens, against the CPU's sampler in float64."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted import DEVICE
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.model.kernels.gpu import sampling
from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.kernels.gpu.sampling import Draw, _random_bits, draw_tokens
from pdserve.common.worker import sampler
from pdserve.common.worker.philox import uniform

NEAR = 1e-6  # of the sum of all weights: where float32 may decide otherwise
LARGEST = torch.finfo(torch.float32).max
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", 1))  # of 12 rows, for each vocabulary
VOCABS = (1, 2, 31, 33, 1025, 9001)
Key = tuple[int, int]


def draw(logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[Key]) -> list[int]:
    draws = [
        Draw(p.temperature, p.top_k, p.top_p, p.min_p, *key)
        for p, key in zip(params, keys, strict=True)
    ]
    tokens, allowed = draw_tokens(logits.to(DEVICE), draws)
    assert allowed.tolist() == [float(row.max()) > -math.inf for row in logits]  # false for NaN
    return tokens.tolist()


def expected(logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[Key]) -> list[int]:
    return sampler.draw(logits.double(), params, keys)[0].tolist()


def is_near(logits: Tensor, p: SamplingParams, key: Key, token: int) -> bool:
    """Whether a threshold of `p` or the random number is so near to another result that rounding
    decides: with one of them moved by `NEAR`, float64 gives `token`."""
    for top_p in (p.top_p, p.top_p - NEAR, p.top_p + NEAR):
        for min_p in (p.min_p, p.min_p * (1 - NEAR), p.min_p * (1 + NEAR)):
            fields = {"top_p": min(max(top_p, 0), 1), "min_p": min_p}
            moved = SamplingParams(temperature=p.temperature, top_k=p.top_k, **fields)
            probs = sampler.filtered_probs(logits[None].double(), [moved])[0]
            end, total = probs.cumsum(0)[token], probs.sum()
            number = uniform(*key) * total
            if probs[token] > 0 and end - probs[token] - NEAR <= number < end + NEAR:
                return True
    return False


def make_params(chance: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=chance.choice((0.01, 0.5, 1.0, 1.0, 2.0, 100.0)),
        top_k=chance.choice((0, 0, 1, 3, 40, vocab - 1, vocab, 2**40, -1)),
        top_p=chance.choice((1.0, 1.0, 0.9, 0.5, 0.999, 1e-6, chance.random())),
        min_p=chance.choice((0.0, 0.0, 0.05, 1.0, chance.random())),
    )


def make_logits(chance: random.Random, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    logits = torch.randn(rows, vocab, generator=generator)
    logits *= chance.choice((0.0, 0.1, 3.0, 3.0, 3.0, 30.0, 1e5, 1e37))
    if chance.random() < 0.4:  # ties
        logits = logits.bfloat16().float()
    if chance.random() < 0.1:
        logits = logits.round()
    for value in (-math.inf, LARGEST, -LARGEST, -0.0):
        if chance.random() < 0.15:
            logits[torch.rand(rows, vocab, generator=generator) < 0.3] = value
    return logits


def make_key(chance: random.Random) -> Key:
    return chance.getrandbits(chance.choice((3, 32, 64))), chance.getrandbits(33)


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_a_cpu(vocab: int) -> None:
    """Unless the number or a threshold is within 1e-6 of another result, which few rows are."""
    chance, equal, near = random.Random(vocab), 0, 0
    for _ in range(ROUNDS):
        logits = make_logits(chance, 12, vocab)
        params = [make_params(chance, vocab) for _ in logits]
        keys = [make_key(chance) for _ in logits]
        for row, right, found in zip(
            range(len(logits)),
            expected(logits, params, keys),
            draw(logits, params, keys),
            strict=True,
        ):
            if bool((logits[row] == -math.inf).all()):
                assert 0 <= found < vocab
            elif right == found:
                equal += 1
            else:
                assert is_near(logits[row], params[row], keys[row], found), (params[row], row)
                near += 1
    print(f"vocab {vocab}: {equal} equal, {near} near")
    assert near <= max(1, equal / 100)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_any_row_gives_a_token_that_its_logits_allow(data: Any) -> None:
    """For any floats, if a token is allowed; else any token of the vocabulary."""
    floats = st.floats(width=32) | st.sampled_from([-math.inf, LARGEST, -LARGEST, 1e-45, -0.0, 1.0])
    rows = data.draw(st.lists(st.lists(floats, min_size=5, max_size=5), min_size=1, max_size=3))
    params = [
        SamplingParams(
            temperature=data.draw(st.floats()),
            top_k=data.draw(st.integers(-(2**63), 2**63 - 1)),
            top_p=data.draw(st.floats()),
            min_p=data.draw(st.floats()),
        )
        for _ in rows
    ]
    words = st.integers(0, 2**64 - 1)
    keys = [(data.draw(words), data.draw(words)) for _ in rows]
    logits = torch.tensor(rows).clamp(max=LARGEST)
    for token, row, p in zip(draw(logits, params, keys), logits, params, strict=True):
        assert 0 <= token < 5
        if bool((row > -math.inf).any()) and not (bool(row.isnan().any()) or p.temperature == 0):
            assert math.isnan(p.temperature) or row[token] > -math.inf


def test_a_row_does_not_depend_on_the_others() -> None:
    chance = random.Random(0)
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    params, keys = [make_params(chance, 5000) for _ in logits], [make_key(chance) for _ in logits]
    together = draw(logits, params, keys)
    logits[3] = math.nan
    assert draw(logits, params, keys)[:3] == together[:3]
    for row in (0, 4, 8):
        assert draw(logits[row : row + 1], params[row : row + 1], keys[row : row + 1]) == [
            together[row]
        ]


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    """Top-k 1 and the least top-p keep all of the most likely tokens, and only these."""
    logits = torch.zeros(1, 40)
    logits[0, [3, 17, 18, 30]] = 1.5
    logits[0, 5] = 1.4999999
    for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 9.0}):
        params = [SamplingParams(**fields)] * 16
        drawn = draw(logits.expand(16, -1), params, [(seed, 9) for seed in range(16)])
        assert set(drawn) == {3, 17, 18, 30}


def test_zeros_of_both_signs_are_as_likely() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0]]).expand(32, -1)
    drawn = draw(logits, [SamplingParams(top_k=1)] * 32, [(seed, 9) for seed in range(32)])
    assert set(drawn) == {0, 1}


def test_random_numbers_are_those_of_the_host() -> None:
    """All 53 bits."""
    chance = random.Random(1)
    keys = [(chance.getrandbits(64), chance.getrandbits(64)) for _ in range(100)]
    keys += [(0, 0), (2**64 - 1, 2**64 - 1), (2**63, 2**32), (2**32, 2**63)]
    words = [[sampling._signed(word) for word in key] for key in keys]
    bits = torch.zeros(len(keys), dtype=torch.int64, device=DEVICE)
    launch(_store_bits, (len(keys),), torch.tensor(words, device=DEVICE), bits)
    assert [(each % 2**64 >> 11) * 2.0**-53 for each in bits.tolist()] == [
        uniform(*key) for key in keys
    ]


@triton.jit
def _store_bits(keys, bits):
    row = tl.program_id(0)
    word = _random_bits(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(bits + row, word.to(tl.int64))


def test_no_rows_give_no_tokens() -> None:
    assert draw(torch.zeros(0, 7), [], []) == []
