"""Random rows for the sampler, and a slow sampler in plain float64 that shares no code with it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.sampling import SampledToken, SamplingParams, check_sampling
from pdserve.common.worker.input_batch import BadWords, StepSequence, TokenCounts
from pdserve.common.worker.sampler import FailedRow, sample

LARGEST = 3.4028234663852886e38  # of float32
NAN, INF = math.nan, math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """A row: logits as float32 holds them, and all that its token depends on."""

    logits: list[float]
    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    banned: tuple[int, ...]
    seed: int
    position: int
    chunk: int  # tokens that its step computes
    mask: frozenset[int] | None  # the tokens of a grammar


# ---- the reference --------------------------------------------------------------------------


def reference(case: Case, nudge: float = 0.0) -> int | None:
    """The token, or None. `nudge` moves what is compared with sums that may be rounded."""
    p = case.params
    if any(math.isnan(x) for x in case.logits):
        return None
    scores = [min(x, LARGEST) for x in case.logits]
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    counts = Counter(case.output)
    for token in {*counts, *case.prompt}:
        if scores[token] > 0:
            scores[token] /= p.repetition_penalty
        else:
            scores[token] *= p.repetition_penalty
        scores[token] -= p.frequency_penalty * counts[token]
        scores[token] -= p.presence_penalty * (counts[token] > 0)
    for token in case.banned:
        scores[token] = -INF
    for *before, last in p.bad_words_token_ids:
        if before == list(case.output[len(case.output) - len(before) :]):
            scores[last] = -INF
    if p.allowed_token_ids:
        scores = [x if token in p.allowed_token_ids else -INF for token, x in enumerate(scores)]
    if case.mask is not None:
        scores = [x if token in case.mask else -INF for token, x in enumerate(scores)]
    best = max(scores)
    if best == -INF:
        return None
    if p.temperature == 0:
        return scores.index(best)
    return drawn(likely(scores, best, p, nudge), number(case.seed, case.position) * (1 + nudge))


def likely(scores: list[float], best: float, p: SamplingParams, nudge: float) -> list[float]:
    """Returns what every token may be drawn with; rows need not sum to 1."""
    weights = [math.exp((x - best) / p.temperature) for x in scores]
    if 0 < p.top_k < len(scores):
        least = sorted(scores, reverse=True)[p.top_k - 1]
        weights = [w if x >= least else 0.0 for w, x in zip(weights, scores, strict=True)]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    if p.top_p < 1:
        before, least = 0.0, 0.0
        for prob in sorted(probs, reverse=True):
            if before and before >= p.top_p + nudge:
                break
            before, least = before + prob, prob
        probs = [prob if prob >= least else 0.0 for prob in probs]
    least = max(probs) * p.min_p * (1 + nudge)
    return [prob if prob >= least or prob == max(probs) else 0.0 for prob in probs]


def drawn(probs: list[float], number: float) -> int:
    target, reached, last = number * math.fsum(probs), 0.0, 0
    for token, prob in enumerate(probs):
        reached += prob
        last = token if prob else last
        if prob and reached > target:
            return token
    return last


def number(seed: int, position: int) -> float:
    """Philox4x32-10 (Salmon et al., SC'11), key = seed, counter = position: its first 53 bits."""
    word = 2**32
    a, b, c, d = position % word, position // word % word, 0, 0
    k, m = seed % word, seed // word % word
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = y // word ^ b ^ k, y % word, x // word ^ d ^ m, x % word
        k, m = (k + 0x9E3779B9) % word, (m + 0xBB67AE85) % word
    return (a * word + b) // 2048 / 2**53


# ---- cases ----------------------------------------------------------------------------------

EXTREME = {  # finite, refused, and nothing that the arithmetic cannot do
    "repetition_penalty": (1e-39, 1e-45, 3e38),
    "temperature": (1e-45, 1e-30, 3e38),
    "presence_penalty": (3e38, -3e38),
    "min_p": (1.0,),
    "top_p": (1e-45,),
}
ODD = {
    "repetition_penalty": (NAN, INF, 0.0, -1.0, -INF),
    "temperature": (NAN, INF, -1.0, -INF, 5e-324),
    "top_p": (NAN, -1.0, 0.0, 7.0, INF),
    "min_p": (NAN, 9.0, -1.0, INF),
    "presence_penalty": (NAN, INF, -INF),
    "frequency_penalty": (NAN, INF, -INF),
    "top_k": (-7, 2**63 - 1, -(2**63)),
    "logprobs": (-1, 10**6),
}


def make_case(rng: random.Random, vocab: int) -> Case:
    history = [rng.randrange(vocab) for _ in range(rng.choice((0, 3, 30)))]
    cut = rng.randint(0, len(history))
    few = rng.choice((0, 0, 0, 1, 3)) if rng.random() < 0.98 else vocab
    return Case(
        logits=torch.tensor(make_logits(rng, vocab)).tolist(),
        params=make_params(rng, vocab),
        prompt=tuple(history[:cut]),
        output=tuple(history[cut:]),
        banned=tuple(rng.sample(range(vocab), min(few, vocab))),
        seed=rng.choice((0, 7, rng.getrandbits(63))),
        position=rng.choice((9, 10, rng.randint(9, 2**33))),
        chunk=rng.choice((1, 1, 9)),
        mask=make_mask(rng, vocab) if rng.random() < 0.1 else None,
    )


def make_mask(rng: random.Random, vocab: int) -> frozenset[int]:
    """Tokens of which it has bits: a large vocabulary has some that are only padding."""
    within = min(vocab, 288)
    return frozenset(rng.sample(range(within), rng.choice((0, 1, within // 2, within))))


def packed(mask: frozenset[int], vocab: int) -> np.ndarray:
    words = min(-(-vocab // 32), 9)
    return np.frombuffer(sum(1 << token for token in mask).to_bytes(4 * words, "little"), np.int32)


def make_logits(rng: random.Random, vocab: int) -> list[float]:
    scale = rng.choice((0.0, 1e-40, 0.1, 3.0, 3.0, 3.0, 30.0, 1e5, 1e37))
    logits = [rng.gauss(0, 1) * scale for _ in range(vocab)]
    if rng.random() < 0.2:  # ties
        logits = [round(x) for x in logits]
    if rng.random() < 0.15:
        odd = rng.choice((-INF, -INF, INF, 3.4e38, -3.4e38, NAN))
        for _ in range(rng.choice((1, 3, vocab))):
            logits[rng.randrange(vocab)] = odd
    if rng.random() < 0.005:
        logits = [-INF] * vocab
    return [float(x) for x in logits]


def make_params(rng: random.Random, vocab: int) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.01, 0.7, 1.0, 1.0, 2.0, 100.0, rng.random())),
        "top_p": rng.choice((1.0, 1.0, 0.9, 0.5, 1e-6, 1 - rng.random())),
        "top_k": rng.choice((0, 0, 1, 5, vocab - 1, vocab, 10**6)),
        "min_p": rng.choice((0.0, 0.0, 0.05, 1.0, rng.random())),
        "presence_penalty": rng.choice((0.0, 0.0, 2.0, -2.0, rng.uniform(-2, 2))),
        "frequency_penalty": rng.choice((0.0, 0.0, 2.0, -2.0, rng.uniform(-2, 2))),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.2, 0.01, 100.0, rng.uniform(0.01, 3))),
        "logprobs": rng.choice((None, None, 0, 5)),
    }
    if rng.random() < 0.2:
        ids = rng.sample(range(vocab), rng.randint(1, min(vocab, 6)))
        chosen["logit_bias"] = {i: rng.choice((-100.0, 100.0, rng.uniform(-9, 9))) for i in ids}
    if rng.random() < 0.1:
        count = rng.randint(1, rng.choice((1, 3, vocab)))
        chosen["allowed_token_ids"] = tuple(rng.sample(range(vocab), min(count, vocab)))
    if rng.random() < 0.2:
        chosen["bad_words_token_ids"] = tuple(
            tuple(rng.choices(range(min(vocab, 6)), k=rng.randint(1, 3))) for _ in range(4)
        )
    for table, share in ((EXTREME, 0.05), (ODD, 0.05)):
        if rng.random() < share:
            name = rng.choice(list(table))
            chosen[name] = rng.choice(table[name])  # type: ignore[attr-defined]
    return SamplingParams(**chosen)


# ---- outcomes -------------------------------------------------------------------------------


def outcomes(cases: list[Case]) -> list[int | None]:
    """Returns what the sampler makes of a batch; None: the row failed."""

    def banned(case: Case) -> tuple[int, ...]:
        words = BadWords(case.params.bad_words_token_ids)
        words.add(case.output)
        return case.banned + words.banned()

    sequences = [
        StepSequence(
            seq_id=i,
            token_ids=(1,) * case.chunk,
            start=case.position - case.chunk,
            block_tables=((0,),),
            sampling=case.params,
            counts=TokenCounts.of(case.prompt, case.output, len(case.logits))
            if case.params.penalised
            else None,
            banned_token_ids=banned(case),
            seed=case.seed,
            mask=None if case.mask is None else packed(case.mask, len(case.logits)),
        )
        for i, case in enumerate(cases)
    ]
    logits = torch.tensor([case.logits for case in cases])
    before = logits.clone()
    found = sample(logits, sequences).results()
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "they are the caller's"
    for row, case, raw in zip(found, cases, logits, strict=True):
        if is_odd(case.params, len(case.logits)):
            continue
        if isinstance(row, FailedRow):
            assert row == failure_of(case)
        else:
            check_logprobs(row, case, raw)
    return [None if isinstance(row, FailedRow) else row.token_id for row in found]


def failure_of(case: Case) -> FailedRow:
    if any(math.isnan(x) for x in case.logits):
        return FailedRow("the model computed NaN logits")
    return FailedRow("no token is allowed", forbidden=max(case.logits) > -INF)


def check_logprobs(token: SampledToken, case: Case, raw: torch.Tensor) -> None:
    """They are those of the raw distribution, whatever the parameters; as many as are wanted."""
    wanted = case.params.logprobs
    assert (token.logprobs is None) is (wanted is None)
    if token.logprobs is None or wanted is None:
        return
    expected = raw.double().clamp(max=LARGEST).log_softmax(-1).float()
    tops = expected.topk(min(wanted, len(raw))).values.tolist()
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), 1e-4, 1e-4)
    assert [value for _, value in token.logprobs.top] == pytest.approx(tops, 1e-4, 1e-4)
    for each, value in token.logprobs.top:
        assert value == pytest.approx(float(expected[each]), 1e-4, 1e-4)


def is_odd(params: SamplingParams, vocab: int) -> bool:
    """Whether fronts and nodes refuse what has no meaning (`EXTREME` has one)."""
    for name, values in EXTREME.items():
        if getattr(params, name) in values:
            params = replace(params, **{name: 1.0})  # type: ignore[arg-type]
    try:
        check_sampling(params, vocab)
    except InvalidRequest:
        return True
    return False


def exceeds_float32(case: Case) -> bool:
    """Whether float32 cannot tell what float64 tells: it overflows, or logits differ whose tokens
    are equally likely, of which top-p keeps fewer."""
    finite = {min(x, LARGEST) for x in case.logits if x > -INF}
    if case.params.penalised and max(map(abs, finite), default=0.0) > 1e30:
        return True
    if any(getattr(case.params, name) in values for name, values in EXTREME.items()):
        return True
    scaled = {(x - max(finite)) / case.params.temperature for x in finite}
    return len({math.exp(x) for x in scaled if x > -700}) < sum(x > -700 for x in scaled)


def compare(rows: int, batch: int, nudge: float, float32: bool = False) -> Counter[str]:
    """Samples random rows, `batch` at a time, and counts how their tokens compare with the slow
    sampler's. `nudge`: the share of a sum that rounding may move. `float32`: the sampler computes
    in it."""
    rng, seen = random.Random(rows), Counter[str]()
    while seen.total() < rows:
        vocab = rng.choice((2, 9, 33, 33, 33, 33, 33, 300))
        cases = [make_case(rng, vocab) for _ in range(batch if vocab < 300 else batch // 25)]
        for case, found in zip(cases, outcomes(cases), strict=True):
            assert found is None or (0 <= found < vocab and found not in case.banned), case
            assert found is None or case.mask is None or found in case.mask, case
            if is_odd(case.params, vocab):
                seen["odd"] += 1
            elif (expected := reference(case)) == found:
                seen["failed" if found is None else "equal"] += 1
            elif float32 and exceeds_float32(case):
                seen["beyond"] += 1
            else:  # on a threshold, which sums in another order miss
                nudged = {reference(case, nudge), reference(case, -nudge)}
                assert found in nudged and None not in nudged, (case, found, expected)
                seen["threshold"] += 1
    print(dict(seen))
    return seen
