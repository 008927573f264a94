"""Log-probabilities of prompt tokens, from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.model.staging import fetch, upload
from pdserve.common.worker.input_batch import StepSequence

# Logits at once: a long prompt's, each of its tokens times the vocabulary, fit into no memory.
MAX_LOGITS = 2**22

Scores = tuple[tuple[int, PromptLogprobs], ...]  # (seq_id, what was wanted of its tokens)


def score_prompts(
    hidden: Tensor,
    scored: Iterable[tuple[int, StepSequence]],
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    samples: bool,
) -> Scores:
    """What sequences want to know of their `scored` tokens.

    Args:
        hidden: `[T, hidden]`, a step's sequences end to end.
        scored: sequences, and the row of the first token of each.
        compute_logits: `[B, hidden]` → float32 `[B, vocab]`. Ranks that share the vocabulary all
            compute them; who `samples` looks at them.
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
            scores.append((sequence.seq_id, _told(sequence, parts)))
    return tuple(scores)


def _score(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """For each row its token's log-probability and rank, the `num_top` most likely tokens and
    theirs."""
    logprobs = logits.clamp(max=torch.finfo(logits.dtype).max).log_softmax(dim=-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return own, ranks.int(), ids.int(), values


def _told(sequence: StepSequence, parts: Sequence[tuple[Tensor, ...]]) -> PromptLogprobs:
    own, ranks, ids, values = fetch(*(torch.cat(each) for each in zip(*parts, strict=True)))
    return PromptLogprobs(
        start=sequence.start + 1,
        num_top=ids.shape[1],
        logprobs=own.numpy().tobytes(),
        ranks=ranks.numpy().tobytes(),
        top_token_ids=ids.numpy().tobytes(),
        top_logprobs=values.numpy().tobytes(),
    )
