"""What a node does before it spends anything on a job: it does not trust its sender's sums."""

from __future__ import annotations

from common.core.errors import InvalidRequest
from common.core.request import GenerateJob
from common.core.sampling import MAX_CHOICES, check_range, check_sampling, check_token_ids


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
    check_sampling(job.sampling, vocab_size)
    check_token_ids(job.prompt_token_ids, vocab_size, "prompt")
    for choice in job.choices:
        check_range("choice", choice.index, 0, MAX_CHOICES - 1)
        check_token_ids(choice.output_token_ids, vocab_size, "prompt")
