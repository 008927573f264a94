"""Client input to sampling parameters: one validation for HTTP and gRPC."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.sampling import (
    MAX_CHOICES,
    MAX_TOKENS_NAMED,
    SamplingParams,
    check_count,
    check_range,
    check_sampling,
)

MAX_STOPS = 4
MAX_STOP_CHARS = 1024


def make_sampling(
    *,
    vocab_size: int,
    max_tokens: int,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    """Validated parameters; None takes the default, and a random seed.

    Raises:
        InvalidRequest: a value is out of range; `param` is the argument's name.
    """
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": secrets.randbits(63) if seed is None else seed,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
    }
    values = {name: value for name, value in given.items() if value is not None}
    # Counted before anything is made of them: they may be millions.
    check_count("logit_bias", logit_bias or ())
    check_count("stop_token_ids", stop_token_ids or ())
    params = SamplingParams(
        **values,
        logit_bias=_logit_bias(logit_bias or {}),
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=bool(ignore_eos),
    )
    check_sampling(params, vocab_size)
    return replace(params, top_k=0) if top_k == -1 else params


def make_choices(n: int | None) -> int:
    """The number of choices; 1 when absent."""
    check_range("n", n := 1 if n is None else n, 1, MAX_CHOICES)
    return n


def make_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple without repeats."""
    given = (stop,) if isinstance(stop, str) else (stop or ())
    stops = tuple(dict.fromkeys(given[: MAX_TOKENS_NAMED + 1]))
    if len(stops) > MAX_STOPS or len(given) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings", param="stop")
    if any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop"
        )
    return stops


def _logit_bias(bias: Mapping[str, float] | Mapping[int, float]) -> dict[int, float]:
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise InvalidRequest("logit_bias keys must be token ids", param="logit_bias") from error
