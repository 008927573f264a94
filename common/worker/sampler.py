"""Samples tokens from logits: one row per sequence, independent of the other rows.

    logits ─ adjust ─┬─ greedy rows: argmax
                     └─ others: top-k ─ temperature ─ top-p ─ min-p ─ draw

A pure function: random numbers are keyed by (seed, position), so a sequence draws the same tokens
in any batch, on any rank and any node.

It is total: for any logits and parameters each row gives an allowed token of the vocabulary or a
`FailedRow`; NaN and infinity do not spread to other rows. A CPU computes in float64, where no
float32 parameter makes a float32 logit overflow. A GPU computes in float32 and draws with Triton
kernels (`kernels/gpu/sampling.py`); its tokens are a CPU's, except where rounding moves a
threshold.

It runs on the logits' device, and the host of a GPU waits only once, for all results: nothing
before depends on a value (no boolean indexing). The tokens are on the device before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.common.model.staging import begin_fetch, column, indices, select_rows
from pdserve.common.planning.footprint import SAMPLED_AT_ONCE
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.logit_adjust import adjust, adjusts
from pdserve.common.worker.philox import uniform

logger = logging.getLogger(__name__)

_TOP_P_WIDTH = 256  # tokens sorted first; nuclei are nearly always smaller


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row without a token."""

    reason: str
    forbidden: bool = False  # the request's own parameters forbid every token


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled batch. `tokens`: int64 `[B]`, on the device; any token of the vocabulary for a
    failed row. `results` waits for the device."""

    tokens: Tensor
    results: Callable[[], list[SampledToken | FailedRow]]


def sample(logits: torch.Tensor, sequences: Sequence[StepSequence]) -> Sampled:
    """Samples one token per row.

    Args:
        logits: `[B, vocab]` float32; not modified.
        sequences: the sequence of each row; all have `sampling`.
    """
    try:
        return _sample(logits, sequences)
    except Exception as error:  # halving the batch finds the row that causes it
        if len(sequences) == 1:
            logger.exception("sequence %d cannot be sampled", sequences[0].seq_id)
            failed = FailedRow(f"sampling raised {type(error).__name__}")
            return Sampled(logits.new_zeros(1, dtype=torch.int64), lambda: [failed])
    half = len(sequences) // 2
    first = sample(logits[:half], sequences[:half])
    second = sample(logits[half:], sequences[half:])
    tokens = torch.cat((first.tokens, second.tokens))
    return Sampled(tokens, lambda: first.results() + second.results())


def _sample(logits: torch.Tensor, sequences: Sequence[StepSequence]) -> Sampled:
    params = [params_of(sequence) for sequence in sequences]
    best, tokens = logits.max(dim=-1)  # prefers NaN to any number
    rows = [row for row, p in enumerate(params) if not p.greedy or adjusts(sequences[row], p)]
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if rows or asking:
        logits = _finite(logits, best)
    results = [tokens, best]
    if rows:
        allowed = torch.ones_like(best, dtype=torch.bool)
        for some in _parts(rows, logits.shape[1]):
            where = indices(some, logits)
            tokens[where], allowed[where] = _choose(
                _scores(logits.index_select(0, where)),
                [sequences[row] for row in some],
                [params[row] for row in some],
            )
        results.append(allowed)
    if asking:
        width = min(max(params[row].logprobs or 0 for row in asking), logits.shape[1])
        results += _logprobs(select_rows(logits, asking), select_rows(tokens, asking), width)
    fetched = begin_fetch(*results)

    def on_host() -> list[SampledToken | FailedRow]:
        ids, tops, *more = (each.tolist() for each in fetched())
        allowed_rows = more.pop(0) if rows else [True] * len(ids)
        logprobs = dict(zip(asking, zip(*more, strict=True), strict=True)) if asking else {}
        return [
            SampledToken(
                ids[row], _to_token_logprobs(logprobs[row], p) if row in logprobs else None
            )
            if tops[row] > -math.inf and allowed_rows[row]  # false for NaN
            else _failed(tops[row])
            for row, p in enumerate(params)
        ]

    return Sampled(tokens, on_host)


def _parts(rows: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
    """Cuts the rows into parts of `SAMPLED_AT_ONCE` logits at most, or a single row."""
    size = max(1, SAMPLED_AT_ONCE // vocab_size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _fused(logits: torch.Tensor) -> bool:
    """Returns whether `kernels/gpu` draws the tokens."""
    return logits.device.type == "cuda"


def compile_kernels(vocab: int, device: torch.device) -> None:
    """Compiles the kernels that draw on a GPU, whatever filters a batch will have."""
    from pdserve.common.model.kernels.gpu import sampling

    sampling.warm_up(vocab, device)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits in the precision in which they are adjusted."""
    return logits if _fused(logits) else logits.double()


def _finite(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Replaces +infinity by the largest float. A CPU skips this if there is none; on a GPU that
    check would make the host wait."""
    if logits.device.type == "cpu" and not bool((best == math.inf).any()):
        return logits
    return logits.clamp(max=torch.finfo(logits.dtype).max)


def _failed(top: float) -> FailedRow:
    """Returns the failure of a row whose largest logit is `top`."""
    if math.isnan(top):
        return FailedRow("the model computed NaN logits")
    return FailedRow("no token is allowed", forbidden=top > -math.inf)


def params_of(sequence: StepSequence) -> SamplingParams:
    if sequence.sampling is None:
        raise ValueError(f"sequence {sequence.seq_id} has nothing to sample")
    return sequence.sampling


def _choose(
    scores: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns per row of `scores`, which it modifies, the token and whether it is allowed."""
    scores = adjust(scores, sequences, params)
    best, tokens = scores.max(dim=-1)
    allowed = best > -math.inf
    if drawn := [row for row, p in enumerate(params) if not p.greedy]:
        where, some = indices(drawn, scores), select_rows(scores, drawn)
        chosen = [params[row] for row in drawn]
        # Positions count from the sequence's start, so a resumed sequence draws the same numbers.
        keys = [(s.seed, s.start + len(s.token_ids)) for s in (sequences[row] for row in drawn)]
        if _fused(scores):
            from pdserve.common.model.kernels.gpu import sampling  # torch for CUDA brings Triton

            draws = [
                sampling.Draw(p.temperature, p.top_k, p.top_p, p.min_p, *key)
                for p, key in zip(chosen, keys, strict=True)
            ]
            tokens[where], allowed[where] = sampling.draw_tokens(some, draws)
        else:
            tokens[where], allowed[where] = draw(some, chosen, keys)
    return tokens, allowed


# ---- drawing on a CPU ----


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples by inverting the cumulative distribution (float64, so that its tail counts): the
    first token whose cumulative probability exceeds the random number of the row's `keys`, seed and
    position. Returns the tokens and whether each has a probability above 0."""
    probs = filtered_probs(logits, params)
    cumulative = probs.cumsum(dim=-1)
    numbers = column([uniform(*key) for key in keys], cumulative)
    tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    tokens.clamp_(max=probs.shape[1] - 1)  # a row of NaN gives an index past the end
    return tokens.squeeze(1), probs.gather(1, tokens).squeeze(1) > 0


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns the sampling weights, float64 `[B, vocab]`; rows need not sum to 1.

    top-k keeps the k most likely tokens, top-p (Holtzman et al., 2019) the fewest of these whose
    share is at least p, min-p those at least p times as likely as the most likely one. Filters are
    thresholds: tokens as likely as the last one kept stay too, so the result does not depend on the
    sorting order. Works in place if `logits` are float64, to avoid a large copy.
    """
    # top-k first: after rounding, close logits could become equal.
    logits = _filter_top_k(logits.double(), params)
    # Shift the maximum to 0, so that no temperature overflows.
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    logits.div_(column([p.temperature for p in params], logits))
    probs = logits.exp_()
    probs.div_(probs.sum(dim=-1, keepdim=True))
    probs = _filter_top_p(probs, params)
    if any(p.min_p > 0 for p in params):
        most = probs.amax(dim=-1, keepdim=True)
        least = most * column([min(p.min_p, 1.0) for p in params], probs)
        probs.masked_fill_(probs < least, 0.0)
    return probs


def _filter_top_k(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab = logits.shape[1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab]
    if not rows:
        return logits
    ks = [params[row].top_k for row in rows]
    subset = select_rows(logits, rows)
    least = subset.topk(max(ks), dim=-1).values.gather(1, indices(ks, logits).unsqueeze(1) - 1)
    logits[indices(rows, logits)] = subset.masked_fill(subset < least, -torch.inf)
    return logits


def _filter_top_p(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if not rows:
        return probs
    share = column([params[row].top_p for row in rows], probs)
    subset = select_rows(probs, rows)
    width = _TOP_P_WIDTH
    while True:
        values = subset.topk(min(width, subset.shape[1]), dim=-1).values
        before = values.cumsum(dim=-1) - values
        if width >= subset.shape[1] or bool((before[:, -1:] >= share).all()):
            break
        width *= 16
    kept = (before < share).sum(dim=-1, keepdim=True).clamp(min=1)
    least = values.gather(1, kept - 1)
    probs[indices(rows, probs)] = subset.masked_fill(subset < least, 0.0)
    return probs


# ---- log-probabilities ----


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns log-probabilities of the model's own distribution, before any adjustment: of the
    `chosen` tokens `[B]`, and the values and ids of the most likely ones `[B, width]`."""
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = most_likely(logprobs, width)
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), values, tokens


def most_likely(logprobs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values and ids of the largest `[B, width]`, descending; of equal ones, which
    bfloat16 often gives, the lower id comes first. `topk` takes any, depending on `width`, which is
    the widest of a batch."""
    if width == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    if logprobs.device.type != "cpu":  # the check below would make the host wait
        ids = _unequal(logprobs).topk(width, dim=-1).indices
        return logprobs.gather(1, ids), ids
    values, ids = logprobs.topk(width, dim=-1)
    tied = (logprobs >= values[:, -1:]).sum(dim=-1) > width
    if bool(tied.any()):  # the last one has equals that were left out
        ids[tied] = _unequal(logprobs[tied]).topk(width, dim=-1).indices
    ids = ids.sort(dim=-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _unequal(values: torch.Tensor) -> torch.Tensor:
    """Returns int64 keys in the order of float32 `values`, all different in a row: a lower column
    has the higher key."""
    bits = values.view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement of negative floats
    columns = torch.arange(values.shape[1], device=values.device)
    return (ascending.long() << 32) + (values.shape[1] - columns)


def _to_token_logprobs(
    found: tuple[float, list[float], list[int]], params: SamplingParams
) -> TokenLogprobs:
    """Returns a row of `_logprobs`, cut to the requested number."""
    logprob, values, tokens = found
    return TokenLogprobs(logprob, tuple(zip(tokens, values, strict=True))[: params.logprobs])
