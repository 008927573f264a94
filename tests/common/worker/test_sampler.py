"""The sampler against a slow one in plain float64 that shares no code with it: the same token for
every row, whatever else is in its batch, its log-probabilities, and no token where there can be
none. FUZZ_ROWS says how many rows."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.worker.input_batch import StepSequence, TokenCounts
from pdserve.common.worker.philox import philox4x32
from pdserve.common.worker.sampler import FailedRow, _unequal, sample
from sampler_cases import INF, compare

ROWS = int(os.environ.get("FUZZ_ROWS", 5_000))


def test_every_row_is_what_a_slow_sampler_says() -> None:
    seen = compare(ROWS, batch=250, nudge=1e-9)
    assert seen["threshold"] <= ROWS / 1000
    assert min(seen["odd"], seen["failed"]) > ROWS / 100 and seen["equal"] > ROWS * 0.8


# ---- what the slow one does not say ----------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with the method (Random123)
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (" ".join(["ffffffff"] * 4), "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    given, keys, words = ([int(word, 16) for word in x.split()] for x in (counter, key, expected))
    assert philox4x32(tuple(given), tuple(keys)) == tuple(words)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"logprobs": -1}, {"frequency_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_exception_fails_its_row_not_the_batch(params: dict[str, Any], place: int) -> None:
    """An exception of any kind does: here a value that a node would not let through, and counts of
    another vocabulary."""
    counts = TokenCounts.of((), (), 5)
    rows = [StepSequence(1, (5,), 7, (0,), SamplingParams(temperature=0.0))] * 5
    rows[place] = replace(rows[0], sampling=SamplingParams(**params), counts=counts)
    found = sample(torch.tensor([[1.0, 3.0, 2.0]]).expand(5, -1), rows).results()
    assert [i for i, each in enumerate(found) if isinstance(each, FailedRow)] == [place]
    assert all(each == SampledToken(1) for i, each in enumerate(found) if i != place)


def test_a_row_that_samples_nothing_fails() -> None:
    found = sample(torch.zeros(1, 3), [StepSequence(1, (5,), 7, (0,))]).results()
    assert found == [FailedRow("sampling raised ValueError")]


def test_the_most_likely_tokens_do_not_depend_on_what_other_rows_ask() -> None:
    """Logits of bfloat16 are often equal; the lower token comes first."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    logits[:, 7:400:9] = logits.amax(dim=-1, keepdim=True)
    asked = (1, 2, 5, 0, 20, 3)
    rows = [
        StepSequence(1, (5,), 7, (0,), SamplingParams(temperature=0.0, logprobs=each))
        for each in asked
    ]
    together = sample(logits, rows).results()
    for row, each in enumerate(rows):
        (alone,) = sample(logits[row : row + 1], [each]).results()
        assert together[row] == alone
        tokens = logits[row].argsort(descending=True, stable=True)[: asked[row]].tolist()
        assert isinstance(alone, SampledToken) and alone.logprobs is not None
        assert [token for token, _ in alone.logprobs.top] == tokens


def test_keys_of_a_gpu_order_tokens_alike() -> None:
    values = torch.tensor([[0.0, -INF, -1.5, 3.0, -1.5, 3.0, -0.25, INF, -1e-45, 1e-45]])
    order = _unequal(values).argsort(descending=True)
    assert order.tolist() == values.argsort(descending=True, stable=True).tolist()
