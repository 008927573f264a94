"""Computes log-probabilities of prompt tokens from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.model.staging import fetch, upload
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.sampler import most_likely

# Logits computed at once; a long prompt's logits (tokens × vocabulary) would not fit into memory.
MAX_LOGITS = 2**22

Scores = tuple[tuple[int, PromptLogprobs], ...]  # (seq_id, scores)


def score_prompts(
    hidden: Tensor,
    scored: Iterable[tuple[int, StepSequence]],
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    samples: bool,
) -> Scores:
    """Scores the `scored` tokens of the sequences.

    Args:
        hidden: `[T, hidden]`, a step's sequences end to end.
        scored: (row of the first token, sequence).
        compute_logits: `[B, hidden]` → float32 `[B, vocab]`. All ranks that share the vocabulary
            must call it; only the one that `samples` uses the result.
    """
    num_rows = max(1, MAX_LOGITS // vocab_size)
    scores = []
    for first, sequence in scored:
        rows = hidden[first : first + len(sequence.scored)]
        tokens = upload(torch.tensor(sequence.scored, dtype=torch.int64), hidden.device)
        parts = []
        for some, their in zip(rows.split(num_rows), tokens.split(num_rows), strict=True):
            logits = compute_logits(some)
            if samples:
                parts.append(_score(logits, their, sequence.num_top))
        if samples:
            scores.append((sequence.seq_id, _to_prompt_logprobs(sequence, parts)))
    return tuple(scores)


def _score(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """Returns, per row, the token's log-probability and rank, and the ids and log-probabilities of
    the `num_top` most likely tokens."""
    logprobs = logits.clamp(max=torch.finfo(logits.dtype).max).log_softmax(dim=-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1)
    values, ids = most_likely(logprobs, min(num_top, logprobs.shape[1]))
    return own, ranks.int(), ids.int(), values


def _to_prompt_logprobs(
    sequence: StepSequence, parts: Sequence[tuple[Tensor, ...]]
) -> PromptLogprobs:
    own, ranks, ids, values = fetch(*(torch.cat(each) for each in zip(*parts, strict=True)))
    return PromptLogprobs(
        start=sequence.start + 1,
        num_top=ids.shape[1],
        logprobs=own.numpy().tobytes(),
        ranks=ranks.numpy().tobytes(),
        top_token_ids=ids.numpy().tobytes(),
        top_logprobs=values.numpy().tobytes(),
    )
