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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.common.model.staging import fetch, upload
from pdserve.common.worker.input_batch import StepSequence, TokenCounts

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
    rows = [row for row, p in enumerate(params) if not p.greedy or _adjusts(sequences[row], p)]
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if rows or asking:
        logits = _finite(logits, best)
    results = [tokens, best]
    if rows:
        chosen, allowed = _choose(
            logits.index_select(0, _indices(rows, logits)).double(),
            [sequences[row] for row in rows],
            [params[row] for row in rows],
        )
        where = _indices(rows, logits)
        tokens[where] = chosen
        results.append(torch.ones_like(best, dtype=torch.bool).index_copy_(0, where, allowed))
    if asking:
        width = min(max(params[row].logprobs or 0 for row in asking), logits.shape[1])
        results += _logprobs(_select(logits, asking), _select(tokens, asking), width)
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


def _select(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Those rows; all of them without a copy."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, _indices(rows, tensor))


def _indices(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), like.device)


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
        where = _indices(drawn, scores)
        tokens[where], allowed[where] = draw(
            _select(scores, drawn),
            [params[row] for row in drawn],
            [sequences[row] for row in drawn],
        )
    return tokens, allowed


# ---- adjusting logits ----


def _adjusts(sequence: StepSequence, params: SamplingParams) -> bool:
    return (
        params.penalised
        or bool(params.logit_bias or params.allowed_token_ids or sequence.banned_token_ids)
        or sequence.mask is not None
    )


def adjust(
    logits: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Logits after bias, penalties, bans and what is not allowed, in place."""
    biases = [p.logit_bias for p in params]
    if any(biases):
        cells, kept = _cells(biases, logits)
        values = [*chain.from_iterable(bias.values() for bias in biases)]
        logits[cells] += upload(torch.tensor(values, dtype=logits.dtype)[kept], logits.device)
    if penalised := [row for row, p in enumerate(params) if p.penalised]:
        logits[_indices(penalised, logits)] = _penalise(
            _select(logits, penalised),
            [sequences[row] for row in penalised],
            [params[row] for row in penalised],
        )
    banned = [sequence.banned_token_ids for sequence in sequences]
    if any(banned):
        logits[_cells(banned, logits)[0]] = -torch.inf
    if restricted := [row for row, p in enumerate(params) if p.allowed_token_ids]:
        shape = len(restricted), logits.shape[1]
        forbidden = torch.ones(shape, dtype=torch.bool, device=logits.device)
        forbidden[_cells([params[row].allowed_token_ids for row in restricted], logits)[0]] = False
        where = _indices(restricted, logits)
        logits[where] = logits[where].masked_fill(forbidden, -torch.inf)
    masks = [(row, each.mask) for row, each in enumerate(sequences) if each.mask is not None]
    if masks:
        where = _indices([row for row, _ in masks], logits)
        logits.index_add_(0, where, _biases(np.stack([mask for _, mask in masks]), logits))
    return logits


# Of the eight tokens that a byte of a mask speaks of: this is some times as fast as to select them.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_BYTE_BIASES = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), 0.0, -math.inf)


def _biases(words: NDArray[np.int32], logits: torch.Tensor) -> torch.Tensor:
    """`[B, vocab]`: 0 for a token that has its bit, else minus infinity."""
    vocab, device = logits.shape[1], logits.device
    table = upload(torch.from_numpy(_BYTE_BIASES).to(logits.dtype), device)
    places = upload(torch.from_numpy(words.view(np.uint8)), device).int()
    biases = table.index_select(0, places.flatten()).view(len(words), -1)[:, :vocab]
    if (missing := vocab - biases.shape[1]) > 0:
        biases = torch.nn.functional.pad(biases, (0, missing), value=-math.inf)
    return biases


def _cells(
    named: Sequence[Collection[int]], logits: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Where in `logits` are the tokens that each row names, and which of these there are: ids come
    from clients, and those that name no token have no effect. They may be thousands: no loop."""
    tokens = torch.tensor([*chain.from_iterable(named)], dtype=torch.int64)
    rows = torch.arange(len(named)).repeat_interleave(torch.tensor([*map(len, named)]))
    kept = (tokens >= 0) & (tokens < logits.shape[1])
    return (upload(rows[kept], logits.device), upload(tokens[kept], logits.device)), kept


def _penalise(
    logits: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Repetition penalty over prompt and output (Keskar et al., "CTRL", 2019: scores move
    towards minus infinity by a factor); frequency and presence penalties over the output
    alone, as OpenAI defines them."""
    known = [counts_of(sequence) for sequence in sequences]
    counts = torch.stack([each.output for each in known])
    seen = (counts > 0) | torch.stack([each.prompt for each in known])
    repetition = _column([p.repetition_penalty for p in params], logits)
    logits = torch.where(
        seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    logits -= _column([p.frequency_penalty for p in params], logits) * counts
    logits -= _column([p.presence_penalty for p in params], logits) * (counts > 0)
    return logits


def counts_of(sequence: StepSequence) -> TokenCounts:
    if sequence.counts is None:
        raise ValueError(f"sequence {sequence.seq_id} has penalties and no counts")
    return sequence.counts


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
    numbers = _column([uniform(s.seed, s.start + len(s.token_ids)) for s in sequences], cumulative)
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
    logits.div_(_column([p.temperature for p in params], logits))
    probs = logits.exp_()
    probs.div_(probs.sum(dim=-1, keepdim=True))
    probs = _filter_top_p(probs, params)
    if any(p.min_p > 0 for p in params):
        most = probs.amax(dim=-1, keepdim=True)
        least = most * _column([min(p.min_p, 1.0) for p in params], probs)
        probs.masked_fill_(probs < least, 0.0)
    return probs


def _filter_top_k(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab = logits.shape[1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab]
    if not rows:
        return logits
    ks = [params[row].top_k for row in rows]
    subset = _select(logits, rows)
    least = subset.topk(max(ks), dim=-1).values.gather(1, _indices(ks, logits).unsqueeze(1) - 1)
    logits[_indices(rows, logits)] = subset.masked_fill(subset < least, -torch.inf)
    return logits


def _filter_top_p(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if not rows:
        return probs
    share = _column([params[row].top_p for row in rows], probs)
    subset = _select(probs, rows)
    width = _TOP_P_WIDTH if probs.device.type == "cpu" else probs.shape[1]  # a look is a wait
    while True:
        values = subset.topk(min(width, subset.shape[1]), dim=-1).values
        before = values.cumsum(dim=-1) - values
        if width >= subset.shape[1] or bool((before[:, -1:] >= share).all()):
            break
        width *= 16
    kept = (before < share).sum(dim=-1, keepdim=True).clamp(min=1)
    least = values.gather(1, kept - 1)
    probs[_indices(rows, probs)] = subset.masked_fill(subset < least, 0.0)
    return probs


# ---- random numbers without state (Philox, Salmon et al., SC 2011) ----

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key (32-bit words each)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for a seed and a position of up to 64 bits."""
    counter = (position & _MASK, position >> 32 & _MASK, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53


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


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """`[len(values), 1]`, of the dtype and device of `like`."""
    return upload(torch.tensor(values, dtype=like.dtype), like.device).unsqueeze(1)
