"""Client input to sampling parameters: one validation for HTTP and gRPC."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.core.errors import InvalidRequest
from common.core.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

MAX_TOKENS_NAMED = 1024  # entries of logit_bias, and of stop_token_ids
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
_SEEDS = 2**63

# Inclusive; None = no bound.
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "temperature": (0, None),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (0, _SEEDS - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, None),
    "logprobs": (0, MAX_LOGPROBS),
}
_POSITIVE = frozenset({"top_p", "repetition_penalty"})  # 0 itself is out of range


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
    for name, value in values.items():
        check_range(name, value, *_RANGES[name])
    if (min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}", param="min_tokens"
        )
    if top_k == -1:
        values["top_k"] = 0
    _check_count("logit_bias", logit_bias or ())
    _check_count("stop_token_ids", stop_token_ids or ())
    return SamplingParams(
        **values,
        logit_bias=_logit_bias(logit_bias or {}, vocab_size),
        stop_token_ids=check_token_ids(stop_token_ids or (), vocab_size, "stop_token_ids"),
        ignore_eos=bool(ignore_eos),
    )


def make_choices(n: int | None) -> int:
    """The number of choices; 1 when absent."""
    check_range("n", n := 1 if n is None else n, 1, MAX_CHOICES)
    return n


def make_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple without repeats."""
    stops = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings", param="stop")
    if any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop"
        )
    return stops


def check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    """Raises InvalidRequest unless low ≤ value ≤ high and value is finite."""
    below = low is not None and (value <= low if name in _POSITIVE else value < low)
    finite = isinstance(value, int) or math.isfinite(value)
    if finite and not below and (high is None or value <= high):
        return
    bounds = "a finite number"
    if low is not None:
        bounds = f"{'greater than' if name in _POSITIVE else 'at least'} {low}"
    if high is not None:
        bounds += f" and at most {high}"
    raise InvalidRequest(f"{name} must be {bounds}, not {value}", param=name)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """The ids, if all are in the vocabulary; raises InvalidRequest otherwise."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"token id {wrong} in {param} is not in 0…{vocab_size - 1}", param=param
        )
    return tuple(token_ids)


def _check_count(name: str, given: Collection[object]) -> None:
    if len(given) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"{name} takes at most {MAX_TOKENS_NAMED} tokens", param=name)


def _logit_bias(
    bias: Mapping[str, float] | Mapping[int, float], vocab_size: int
) -> dict[int, float]:
    try:
        ids = [int(key) for key in bias]
    except ValueError as error:
        raise InvalidRequest("logit_bias keys must be token ids", param="logit_bias") from error
    for value in bias.values():
        check_range("logit_bias", value, -100, 100)
    return dict(zip(check_token_ids(ids, vocab_size, "logit_bias"), bias.values(), strict=True))
