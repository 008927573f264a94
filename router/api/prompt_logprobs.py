"""A prompt's log-probabilities, as vLLM writes them. There may be hundreds of thousands: what is
here runs on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.http.response import MIN_LOGPROB


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: PromptLogprobs, num_top: int
) -> msgspec.Raw:
    """JSON: for each token by their ids itself and the most likely ones; null for the first."""
    texts: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        if (text := texts.get(token_id)) is None:
            text = texts[token_id] = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    told: list[dict[str, Any] | None] = [None]
    for token_id, (logprob, rank, top) in zip(token_ids[1:], found.rows(num_top), strict=True):
        entries = {str(token_id): entry(token_id, logprob, rank)}
        for place, (other, likely) in enumerate(top, 1):
            if other != token_id:
                entries[str(other)] = entry(other, likely, place)
        told.append(entries)
    return msgspec.Raw(msgspec.json.encode(told))
