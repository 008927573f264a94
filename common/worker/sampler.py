"""From logits to tokens: one row per sequence, each row independent of its neighbours.

    logits ─ adjust ─┬─ greedy rows: argmax
                     └─ others: top-k ─ temperature ─ top-p ─ min-p ─ draw

A pure function of its inputs: the random number of a draw is keyed by (seed, position), so the
same sequence draws the same tokens in any batch, on any rank and any node.

It is total: whatever logits and parameters are, each row ends as a token of the vocabulary that
may be chosen, or as a `FailedRow`. All after the model is float64, in which no parameter that fits
into 32 bits makes a float32 logit overflow; what is NaN or infinite nevertheless stays in its row.

All of it is computed where the logits are, and a GPU's host waits for it once, when everything is
fetched together: until then no value is looked at and no boolean mask selects.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.common.model.staging import fetch
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.logit_adjust import adjust, adjusts
from pdserve.common.worker.philox import uniform
from pdserve.common.worker.rows import column, indices, select_rows

logger = logging.getLogger(__name__)

_TOP_P_WIDTH = 256  # nuclei are nearly always this small: look here before sorting more


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row for which there is no token."""

    reason: str
    forbidden: bool = False  # by the request's own parameters: the model did its work


def sample(
    logits: torch.Tensor, sequences: Sequence[StepSequence]
) -> list[SampledToken | FailedRow]:
    """One token per row.

    Args:
        logits: `[B, vocab]` float32; not modified.
        sequences: row i's; all have `sampling`.
    """
    try:
        return _sample(logits, sequences)
    except Exception as error:  # which row it is of, a smaller batch will tell
        if len(sequences) == 1:
            logger.exception("sequence %d cannot be sampled", sequences[0].seq_id)
            return [FailedRow(f"its sampling failed with a {type(error).__name__}")]
    half = len(sequences) // 2
    return sample(logits[:half], sequences[:half]) + sample(logits[half:], sequences[half:])


def _sample(
    logits: torch.Tensor, sequences: Sequence[StepSequence]
) -> list[SampledToken | FailedRow]:
    params = [params_of(sequence) for sequence in sequences]
    best, tokens = logits.max(dim=-1)  # prefers NaN to any number
    rows = [row for row, p in enumerate(params) if not p.greedy or adjusts(sequences[row], p)]
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if rows or asking:
        logits = _finite(logits, best)
    results = [tokens, best]
    if rows:
        chosen, allowed = _choose(
            logits.index_select(0, indices(rows, logits)).double(),
            [sequences[row] for row in rows],
            [params[row] for row in rows],
        )
        where = indices(rows, logits)
        tokens[where] = chosen
        results.append(torch.ones_like(best, dtype=torch.bool).index_copy_(0, where, allowed))
    if asking:
        width = min(max(params[row].logprobs or 0 for row in asking), logits.shape[1])
        results += _logprobs(select_rows(logits, asking), select_rows(tokens, asking), width)
    ids, tops, *more = (each.tolist() for each in fetch(*results))
    allowed_rows = more.pop(0) if rows else [True] * len(ids)
    logprobs = dict(zip(asking, zip(*more, strict=True), strict=True)) if asking else {}
    return [
        SampledToken(ids[row], _told(logprobs[row], p) if row in logprobs else None)
        if tops[row] > -math.inf and allowed_rows[row]  # false for NaN
        else _failed(tops[row])
        for row, p in enumerate(params)
    ]


def _finite(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Infinite ones as the largest there is. A CPU looks whether there are any, for which a GPU's
    host would wait."""
    if logits.device.type == "cpu" and not bool((best == math.inf).any()):
        return logits
    return logits.clamp(max=torch.finfo(logits.dtype).max)


def _failed(top: float) -> FailedRow:
    """Of a row whose largest logit is `top`."""
    if math.isnan(top):
        return FailedRow("the model computed NaN logits")
    return FailedRow("there is no token that may be chosen", forbidden=top > -math.inf)


def params_of(sequence: StepSequence) -> SamplingParams:
    if sequence.sampling is None:
        raise ValueError(f"sequence {sequence.seq_id} has nothing to sample")
    return sequence.sampling


def _choose(
    scores: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of float64 `scores`, which are modified: the token, and whether it may be
    chosen."""
    scores = adjust(scores, sequences, params)
    best, tokens = scores.max(dim=-1)
    allowed = best > -math.inf
    if drawn := [row for row, p in enumerate(params) if not p.greedy]:
        where = indices(drawn, scores)
        tokens[where], allowed[where] = draw(
            select_rows(scores, drawn),
            [params[row] for row in drawn],
            [sequences[row] for row in drawn],
        )
    return tokens, allowed


# ---- drawing ----


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], sequences: Sequence[StepSequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by inverting the cumulative distribution, in float64 so that its tail counts:
    the first token whose cumulative probability exceeds the row's random number. Returns the
    tokens and whether each may be drawn at all."""
    probs = filtered_probs(logits, params)
    cumulative = probs.cumsum(dim=-1)
    # Positions count from the sequence's start, so a resumed sequence goes on where it was.
    numbers = column([uniform(s.seed, s.start + len(s.token_ids)) for s in sequences], cumulative)
    tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    tokens.clamp_(max=probs.shape[1] - 1)  # a row of NaN exceeds nothing
    return tokens.squeeze(1), probs.gather(1, tokens).squeeze(1) > 0


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What each token may be drawn with, float64 `[B, vocab]`; rows need not sum to 1.

    top-k keeps the k most likely tokens, top-p (Holtzman et al., 2019) the fewest of these
    whose share is at least p, min-p those at least p times as likely as the most likely.
    Filters are thresholds: tokens exactly as likely as the last one kept stay too, so the
    result depends on no sorting order. Works in place where `logits` are float64: at their size
    a copy is not nothing.
    """
    # Before anything is rounded: what is to be told apart by it may lie close together.
    logits = _filter_top_k(logits.double(), params)
    # The most likely at 0: nothing overflows, whatever the temperature.
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
    width = _TOP_P_WIDTH if probs.device.type == "cpu" else probs.shape[1]  # a look is a wait
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
    """Of the `chosen` tokens `[B]`; then the most likely ones' and which these are, `[B, width]`.
    Of the model's own distribution, before any adjustment."""
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(width, dim=-1)
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), values, tokens


def _told(found: tuple[float, list[float], list[int]], params: SamplingParams) -> TokenLogprobs:
    """A row of `_logprobs`, as far as it was asked for."""
    logprob, values, tokens = found
    return TokenLogprobs(logprob, tuple(zip(tokens, values, strict=True))[: params.logprobs])
