"""The sampler with the kernel that draws on GPUs: in Triton's interpreter without one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from interpreted import DEVICE
from pdserve.common.core.philox import uniform
from pdserve.common.model.kernels.gpu import sampling
from pdserve.common.model.kernels.gpu.sampling import Draw, draw_tokens
from pdserve.common.worker import sampler
from sampler_cases import compare

ROWS = int(os.environ.get("FUZZ_ROWS", 120))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sampler uses the kernel on a CPU, too, and rows have several blocks."""
    monkeypatch.setattr(sampler, "_fused", lambda logits: True)
    monkeypatch.setattr(sampling, "BLOCK", 32)
    with torch.device(DEVICE):
        yield


@pytest.mark.usefixtures("fused")
def test_every_row_is_what_a_slow_sampler_says() -> None:
    seen = compare(ROWS, batch=50, nudge=3e-6, float32=True)
    assert seen["threshold"] <= ROWS / 50
    assert min(seen["odd"], seen["failed"]) > 0 and seen["equal"] > ROWS * 0.6


def drawn(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    tokens, allowed = draw_tokens(logits, draws)
    assert allowed.all()
    return [int(token) for token in tokens]


def test_random_numbers_are_those_of_the_host() -> None:
    """Rows of equal logits: the token says what the number was, to a part of the vocabulary."""
    rng, vocab = random.Random(3), 1 << 12
    words = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1]
    words += [rng.getrandbits(64) for _ in range(9)]
    keys = [(seed, rng.choice(words)) for seed in words]
    logits = torch.zeros(len(keys), vocab, device=DEVICE)
    found = drawn(logits, [Draw(1.0, 0, 1.0, 0.0, *key) for key in keys])
    assert found == [int(uniform(*key) * vocab) for key in keys]


@pytest.mark.parametrize("vocab", [1, 2, 31, 1025, 5000])
def test_ties_of_a_threshold_all_stay(vocab: int) -> None:
    """Half of the tokens are most likely; any of these may be drawn, whatever k and p."""
    logits = (torch.arange(vocab, device=DEVICE) % 2).float().repeat(24, 1)
    likely = logits[0] == logits[0].max()
    draws = [Draw(1.0, i % 2, 0.01 + (i % 2), 0.0, i, 7) for i in range(24)]
    found = drawn(logits, draws)
    assert likely[found].all()
    assert vocab < 1000 or len(set(found)) > 12


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(6, 300, device=DEVICE) * 3
    draws = [Draw(0.9, 9 * i, 1 - i / 10, 0.0, i, 100 + i) for i in range(6)]
    alone = [drawn(logits[i : i + 1], draws[i : i + 1])[0] for i in range(6)]
    assert drawn(logits, draws) == alone
    assert drawn(logits[:0], []) == []
