"""Rows with each kind of sampling, as the sampler takes them."""

from __future__ import annotations

from typing import Any

import torch

from pdserve.common.core.sampling import SamplingParams
from pdserve.common.worker.input_batch import StepSequence, TokenCounts

VOCAB = 1000
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.5},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 9.0, VOCAB: 1.0}},
    {"temperature": 1.0, "allowed_token_ids": (3, 4, 5)},
]


def sequences(device: torch.device) -> list[StepSequence]:
    found = []
    for i, fields in enumerate(PARAMS):
        params = SamplingParams(**fields)
        counts = TokenCounts(VOCAB, device) if params.penalised else None
        if counts is not None:
            counts.add((1, 2, 3), (4, 4, 5))
        banned = (7, 8) if i % 2 else ()
        found.append(StepSequence(i, (5,), 7 + i, ((0,),), params, counts, banned, seed=i))
    return found
