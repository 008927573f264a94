"""Applies bias, penalties, banned and allowed tokens, and grammar masks to logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.common.core.sampling import SamplingParams
from pdserve.common.model.staging import column, indices, select_rows, upload
from pdserve.common.worker.input_batch import StepSequence, TokenCounts


def adjusts(sequence: StepSequence, params: SamplingParams) -> bool:
    return (
        params.penalised
        or bool(params.logit_bias or params.allowed_token_ids or sequence.banned_token_ids)
        or sequence.mask is not None
    )


def adjust(
    logits: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Applies bias, penalties, banned and allowed tokens and masks in place; returns the logits."""
    biases = [p.logit_bias for p in params]
    if any(biases):
        cells, kept = _cells(biases, logits)
        values = [*chain.from_iterable(bias.values() for bias in biases)]
        logits[cells] += upload(torch.tensor(values, dtype=logits.dtype)[kept], logits.device)
    if penalised := [row for row, p in enumerate(params) if p.penalised]:
        logits[indices(penalised, logits)] = _penalise(
            select_rows(logits, penalised),
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
        where = indices(restricted, logits)
        logits[where] = logits[where].masked_fill(forbidden, -torch.inf)
    masks = [(row, each.mask) for row, each in enumerate(sequences) if each.mask is not None]
    if masks:
        where = indices([row for row, _ in masks], logits)
        logits.index_add_(0, where, _biases(np.stack([mask for _, mask in masks]), logits))
    return logits


# Byte of a mask → biases of its eight tokens. Several times as fast as unpacking the bits.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_BYTE_BIASES = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), 0.0, -math.inf)


def _biases(words: NDArray[np.int32], logits: torch.Tensor) -> torch.Tensor:
    """Returns `[B, vocab]`: 0 for tokens whose bit is set, else minus infinity."""
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
    """Returns the indices in `logits` of each row's tokens, and a mask of the valid ones: invalid
    ids from clients have no effect. Vectorized, as there may be thousands."""
    tokens = torch.tensor([*chain.from_iterable(named)], dtype=torch.int64)
    rows = torch.arange(len(named)).repeat_interleave(torch.tensor([*map(len, named)]))
    kept = (tokens >= 0) & (tokens < logits.shape[1])
    return (upload(rows[kept], logits.device), upload(tokens[kept], logits.device)), kept


def _penalise(
    logits: torch.Tensor, sequences: Sequence[StepSequence], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Applies the repetition penalty over prompt and output (Keskar et al., "CTRL", 2019), and
    OpenAI's frequency and presence penalties over the output."""
    known = [counts_of(sequence) for sequence in sequences]
    # In float32 a huge penalty overflows, and would forbid a token.
    forbidden = logits == -torch.inf if logits.dtype == torch.float32 else None
    counts = torch.stack([each.output for each in known])
    seen = (counts > 0) | torch.stack([each.prompt for each in known])
    repetition = column([p.repetition_penalty for p in params], logits)
    logits = torch.where(
        seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    logits -= column([p.frequency_penalty for p in params], logits) * counts
    logits -= column([p.presence_penalty for p in params], logits) * (counts > 0)
    if forbidden is not None:
        most = torch.finfo(logits.dtype).max
        logits.clamp_(-most, most).masked_fill_(forbidden, -torch.inf)
    return logits


def counts_of(sequence: StepSequence) -> TokenCounts:
    if sequence.counts is None:
        raise ValueError(f"sequence {sequence.seq_id} has penalties and no counts")
    return sequence.counts
