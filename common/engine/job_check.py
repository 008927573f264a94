"""What a node does before it spends anything on a job: it does not trust its sender's sums."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.core.errors import InvalidRequest
from common.core.request import GenerateJob
from common.core.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

_FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def check_job(job: GenerateJob, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a job this node cannot do; a router should have known."""
    longest = max(len(choice.output_token_ids) for choice in job.choices)
    if len(job.prompt_token_ids) + longest >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(job.prompt_token_ids)} tokens; this node's maximum context "
            f"length is {max_model_len} tokens, prompt and completion together",
            param="prompt",
        )
    if len(job.choices) > MAX_CHOICES:
        raise InvalidRequest(f"{len(job.choices)} choices are more than {MAX_CHOICES}", param="n")
    _check_sampling(job.sampling)
    largest = max(_token_ids(job))
    if largest >= vocab_size:
        raise InvalidRequest(
            f"token id {largest} is outside the vocabulary of {vocab_size}", param="prompt"
        )


def _token_ids(job: GenerateJob) -> Iterator[int]:
    yield from job.prompt_token_ids
    yield from job.sampling.logit_bias
    yield from job.sampling.stop_token_ids
    for choice in job.choices:
        yield from choice.output_token_ids


def _check_sampling(sampling: SamplingParams) -> None:
    if (sampling.logprobs or 0) > MAX_LOGPROBS:
        raise InvalidRequest(f"{sampling.logprobs} logprobs are too many", param="logprobs")
    values = [(name, getattr(sampling, name)) for name in _FLOATS]
    values += [("logit_bias", bias) for bias in sampling.logit_bias.values()]
    for name, value in values:
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}", param=name)
