"""The sampler: each filter, penalties, log-probabilities, and that draws are reproducible,
well distributed, and independent of the rest of the batch; and that a row that fails is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.worker.input_batch import StepSequence, TokenCounts
from pdserve.common.worker.logit_adjust import adjust
from pdserve.common.worker.philox import philox4x32
from pdserve.common.worker.sampler import FailedRow, sample

VOCAB = 32


def row(
    sampling: SamplingParams | None = None,
    *,
    position: int = 8,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    vocab: int = VOCAB,
    **fields: Any,
) -> StepSequence:
    params = sampling or SamplingParams()
    counts = TokenCounts.of(prompt, output, vocab) if params.penalised else None
    return StepSequence(1, (5,), position - 1, (0,), params, counts, seed=seed, **fields)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def ids(logits: torch.Tensor, sequences: list[StepSequence]) -> list[int]:
    return [token.token_id for token in sample(logits, sequences)]


# ---- random numbers ----


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with the method (Random123)
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


# ---- draws ----


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 8,000 positions, 7 degrees of freedom: above 24.3 by chance once in 1,000
    seeds, and this seed is fixed."""
    probs = torch.tensor([0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.04, 0.01])
    count = 8000
    sequences = [row(position=i, seed=1234) for i in range(1, count + 1)]
    drawn = torch.tensor(ids(probs.log().expand(count, -1), sequences))
    observed = torch.bincount(drawn, minlength=8).double()
    expected = probs.double() * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 24.3


def test_draws_are_reproducible_and_depend_on_seed_and_position() -> None:
    logits = torch.zeros(50, VOCAB)

    def draws(seed: int, first: int) -> list[int]:
        return ids(logits, [row(position=first + i, seed=seed) for i in range(50)])

    assert draws(7, 10) == draws(7, 10)
    assert draws(7, 10) != draws(8, 10)
    assert draws(7, 10)[5:] == draws(7, 15)[:-5]


def test_a_chunk_and_a_single_token_draw_alike() -> None:
    """A continuation elsewhere computes the prompt again: what counts is the drawn position."""
    chunk = StepSequence(1, (1, 2, 3, 4), 6, (0,), SamplingParams(), seed=3)
    single = StepSequence(2, (4,), 9, (5,), SamplingParams(), seed=3)
    logits = random_logits(1)
    assert ids(logits, [chunk]) == ids(logits, [single])


def test_rows_do_not_depend_on_batch_mates() -> None:
    sequences = [
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(top_k=3), seed=1),
        row(SamplingParams(top_p=0.5), seed=2),
        row(SamplingParams(min_p=0.2, temperature=1.7), seed=3),
        row(SamplingParams(repetition_penalty=1.5), seed=4, prompt=(1, 2), output=(3,)),
        row(SamplingParams(logit_bias={4: 5.0}, logprobs=2), seed=5, banned_token_ids=(9,)),
    ]
    logits = random_logits(len(sequences))
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    backwards = sample(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_logits_are_not_modified() -> None:
    logits = random_logits(1)
    before = logits.clone()
    sample(logits, [row(SamplingParams(logit_bias={1: 9.0}, top_k=2, frequency_penalty=1.0))])
    assert torch.equal(logits, before)


# ---- rows that fail ----

NAN, INF = math.nan, math.inf
GREEDY = SamplingParams(temperature=0.0)


def beside(logits: list[float], one: StepSequence) -> tuple[SampledToken | FailedRow, int]:
    """What becomes of a row between two sound ones, and of the tokens of those."""
    sound = [row(GREEDY), one, row(SamplingParams(seed=5))]
    table = torch.tensor([[1.0, 3.0, 2.0], logits, [1.0, 3.0, -INF]])
    first, found, last = sample(table, sound)
    assert [first] == sample(table[:1], sound[:1]) and [last] == sample(table[2:], sound[2:])
    assert isinstance(first, SampledToken) and isinstance(last, SampledToken)
    return found, first.token_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_fails_its_row_not_the_batch(temperature: float) -> None:
    """It failed the step, and with it the node: the others' tokens are right, and known."""
    found, _ = beside([1.0, NAN, 2.0], row(SamplingParams(temperature=temperature, logprobs=2)))
    assert found == FailedRow("the model computed NaN logits")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2, top_p=0.5)])
def test_a_row_without_a_candidate_fails(params: SamplingParams) -> None:
    nothing = FailedRow("no token is allowed")
    forbidden = FailedRow(nothing.reason, forbidden=True)
    assert beside([1.0, 2.0, 3.0], row(params, banned_token_ids=(0, 1, 2)))[0] == forbidden
    assert beside([-INF, -INF, -INF], row(params))[0] == nothing


@pytest.mark.parametrize("params", [{"logprobs": -1}, {"frequency_penalty": 1.0}], ids=str)
def test_an_exception_fails_its_row_not_the_batch(params: dict[str, Any]) -> None:
    """Of whatever kind: here a value that a node would not let through, and counts of another
    vocabulary."""
    bad = row(SamplingParams(**params), vocab=5)
    for first, last in ((4, 0), (0, 4), (2, 3)):
        rows = [row(GREEDY)] * first + [bad] + [row(GREEDY)] * last
        found = sample(torch.tensor([[1.0, 3.0, 2.0]]).expand(len(rows), -1), rows)
        failed = [i for i, each in enumerate(found) if isinstance(each, FailedRow)]
        assert failed == [first]
        assert all(each == SampledToken(1) for i, each in enumerate(found) if i != first)
    assert sample(torch.zeros(1, 3), [StepSequence(1, (5,), 7, (0,))]) == [
        FailedRow("sampling raised ValueError")
    ]


# ---- penalties ----


def penalised(**params: Any) -> list[float]:
    """Prompt (0, 1), output (1, 2, 2), logits 2, 2, -2, 2."""
    sampling = SamplingParams(**params)
    sequence = row(sampling, prompt=(0, 1), output=(1, 2, 2), vocab=4)
    return adjust(torch.tensor([[2.0, 2.0, -2.0, 2.0]]), [sequence], [sampling])[0].tolist()


# ---- what is allowed ----


def test_a_row_that_may_draw_none_of_the_allowed_is_forbidden() -> None:
    params = SamplingParams(allowed_token_ids=(0, 1))
    found, _ = beside([1.0, 2.0, 3.0], row(params, banned_token_ids=(0, 1)))
    assert isinstance(found, FailedRow) and found.forbidden


# ---- log-probabilities ----


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(2)
    params = SamplingParams(
        temperature=0.0, logit_bias={7: 100.0}, allowed_token_ids=(7, 8), logprobs=3
    )
    token, other = sample(logits, [row(params), row(SamplingParams(logprobs=None))])
    expected = logits[0].log_softmax(-1)
    assert token.token_id == 7
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[7]))
    values, tokens = expected.topk(3)
    assert [t for t, _ in token.logprobs.top] == tokens.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(values.tolist())
    assert other.logprobs is None


def test_logprobs_0_is_the_chosen_token_alone() -> None:
    logits = random_logits(2)
    params = [SamplingParams(logprobs=0), SamplingParams(logprobs=2)]
    first, second = sample(logits, [row(p) for p in params])
    assert first.logprobs is not None
    assert first.logprobs.top == ()
    assert second.logprobs is not None
    assert len(second.logprobs.top) == 2
