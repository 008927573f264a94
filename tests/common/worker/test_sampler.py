"""The sampler: each filter, penalties, log-probabilities, and that draws are reproducible,
well distributed, and independent of the rest of the batch; and that a row that fails is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.common.worker.input_batch import StepSequence, TokenCounts
from pdserve.common.worker.logit_adjust import adjust
from pdserve.common.worker.philox import philox4x32, uniform
from pdserve.common.worker.sampler import FailedRow, filtered_probs, sample

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


def kept(logits: list[float], **params: Any) -> list[int]:
    """The tokens that can be drawn."""
    probs = filtered_probs(torch.tensor([logits]), [SamplingParams(**params)])
    return probs[0].nonzero().flatten().tolist()


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


def test_uniform_is_in_range_and_keyed_by_both() -> None:
    numbers = {uniform(seed, position) for seed in (0, 1, 2**62) for position in range(100)}
    assert len(numbers) == 300
    assert all(0.0 <= number < 1.0 for number in numbers)


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


# ---- greedy ----


def test_greedy_takes_the_most_likely() -> None:
    logits = random_logits(4)
    sequences = [row(SamplingParams(temperature=0.0))] * 4
    assert ids(logits, sequences) == logits.argmax(-1).tolist()


def test_greedy_obeys_bias_and_bans() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    greedy = SamplingParams(temperature=0.0)
    assert ids(logits, [row(greedy, banned_token_ids=(0,))]) == [1]
    assert ids(logits, [row(SamplingParams(temperature=0.0, logit_bias={2: 5.0}))]) == [2]


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0.0, logit_bias={99: 5.0, -1: 5.0})
    assert ids(logits, [row(params, banned_token_ids=(-3, 77))]) == [0]


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


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(logprobs=1), SamplingParams(top_p=0.9)])
def test_infinite_logits_are_the_largest_and_the_least(params: SamplingParams) -> None:
    found, _ = beside([1.0, INF, -INF], row(params))
    assert isinstance(found, SampledToken) and found.token_id == 1
    if found.logprobs:
        assert found.logprobs == TokenLogprobs(0.0, ((1, 0.0),))
    found, _ = beside([INF, INF, 5.0], row(SamplingParams(seed=9)))
    assert isinstance(found, SampledToken) and found.token_id in (0, 1)


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


@pytest.mark.parametrize(
    "odd",
    [
        {"repetition_penalty": 1e-39},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e-45, "temperature": 0.0},
        {"repetition_penalty": 1e-39, "logit_bias": {1: 100.0}},
        {"repetition_penalty": 3e38},
        {"min_p": 9.0},
        {"temperature": 1e-45},
        {"temperature": 3e38, "repetition_penalty": 1e-45},
        {"top_p": 1e-45},
        {"logit_bias": {0: 3e38, 1: -3e38}},
        {"presence_penalty": -3e38, "frequency_penalty": 3e38},
    ],
    ids=str,
)
def test_no_parameter_makes_a_finite_row_overflow(odd: dict[str, Any]) -> None:
    """float32's denormals made logits infinite, these NaN, and the drawn id the vocabulary's
    size. Such values are refused; the sampler has an answer for them nevertheless."""
    params = SamplingParams(**odd)
    sequences = [row(params, seed=i, prompt=(0, 1), output=(2, 1)) for i in range(32)]
    for logits in (random_logits(32), torch.full((32, VOCAB), 3e38), -random_logits(32) * 1e37):
        assert all(0 <= token_id < VOCAB for token_id in ids(logits, sequences))


# ---- filters ----

LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log().tolist()


def test_top_k_keeps_k() -> None:
    assert kept(LOGITS, top_k=2) == [0, 1]
    assert kept(LOGITS, top_k=0) == [0, 1, 2, 3, 4]
    assert kept(LOGITS, top_k=99) == [0, 1, 2, 3, 4]


def test_top_k_keeps_ties_of_the_last() -> None:
    assert kept(LOGITS, top_k=4) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    assert kept(LOGITS, top_p=0.4) == [0]
    assert kept(LOGITS, top_p=0.6) == [0, 1]
    assert kept(LOGITS, top_p=0.8) == [0, 1, 2]
    assert kept(LOGITS, top_p=1e-9) == [0]


def test_top_p_counts_shares_of_what_top_k_left() -> None:
    assert kept(LOGITS, top_k=2, top_p=0.6) == [0]  # 0.5 / 0.75 is enough


def test_top_p_of_a_flat_distribution_is_wide() -> None:
    logits = (torch.arange(5000) * 1e-4).tolist()
    share = torch.tensor(logits).softmax(-1).flip(0).cumsum(0)
    expected = int((share < 0.5).sum()) + 1
    assert abs(len(kept(logits, top_p=0.5)) - expected) <= 1


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert kept(LOGITS, min_p=0.3) == [0, 1]
    assert kept(LOGITS, min_p=1.0) == [0]


def test_temperature_sharpens_and_flattens() -> None:
    def share(temperature: float) -> float:
        probs = filtered_probs(torch.tensor([LOGITS]), [SamplingParams(temperature=temperature)])
        return float(probs[0, 0] / probs[0, 1])

    assert share(1.0) == pytest.approx(2.0, rel=1e-5)
    assert share(0.5) == pytest.approx(4.0, rel=1e-5)
    assert share(2.0) == pytest.approx(2.0**0.5, rel=1e-5)


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(8)
    sequences = [row(SamplingParams(temperature=1e-6), seed=i) for i in range(8)]
    assert ids(logits, sequences) == logits.argmax(-1).tolist()


# ---- penalties ----


def penalised(**params: Any) -> list[float]:
    """Prompt (0, 1), output (1, 2, 2), logits 2, 2, -2, 2."""
    sampling = SamplingParams(**params)
    sequence = row(sampling, prompt=(0, 1), output=(1, 2, 2), vocab=4)
    return adjust(torch.tensor([[2.0, 2.0, -2.0, 2.0]]), [sequence], [sampling])[0].tolist()


def test_repetition_penalty_covers_prompt_and_output() -> None:
    assert penalised(repetition_penalty=2.0) == [1.0, 1.0, -4.0, 2.0]


def test_presence_penalty_covers_output_once() -> None:
    assert penalised(presence_penalty=0.5) == [2.0, 1.5, -2.5, 2.0]


def test_frequency_penalty_counts_output() -> None:
    assert penalised(frequency_penalty=0.5) == [2.0, 1.5, -3.0, 2.0]


def test_bans_outweigh_bias() -> None:
    sampling = SamplingParams(logit_bias={0: 100.0})
    sequence = row(sampling, banned_token_ids=(0,))
    assert adjust(torch.zeros(1, 3), [sequence], [sampling])[0].tolist() == [-torch.inf, 0.0, 0.0]


# ---- what is allowed ----

ONLY = (3, 7, 11)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}], ids=str
)
def test_nothing_is_drawn_but_what_is_allowed(params: dict[str, Any]) -> None:
    logits = random_logits(64)
    rows = [row(SamplingParams(**params, allowed_token_ids=ONLY), seed=i) for i in range(64)]
    drawn = ids(logits, rows)
    assert set(drawn) == set(ONLY)
    if "temperature" in params:
        assert drawn == [ONLY[i] for i in logits[:, ONLY].argmax(-1).tolist()]


def test_what_is_allowed_may_be_penalised_biased_and_banned() -> None:
    sampling = SamplingParams(
        allowed_token_ids=(0, 1, 3), logit_bias={3: 1.0, 2: 100.0}, presence_penalty=0.5
    )
    sequence = row(sampling, output=(1,), banned_token_ids=(0,), vocab=4)
    adjusted = adjust(torch.ones(1, 4), [sequence], [sampling])
    assert adjusted[0].tolist() == [-INF, 0.5, -INF, 2.0]


def test_only_the_row_that_says_so_is_restricted() -> None:
    free, bound = row(GREEDY), row(SamplingParams(temperature=0.0, allowed_token_ids=(2, 77)))
    assert ids(torch.tensor([[3.0, 2.0, 1.0]] * 3), [free, bound, free]) == [0, 2, 0]


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
