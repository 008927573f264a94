"""How a sequence's next token is chosen, when the sequence ends, and what may be asked for."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.core.errors import InvalidRequest

MAX_TOKENS = 2**31 - 1  # to ask for; a context window is shorter
MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20  # beside the chosen token
MAX_TOKENS_NAMED = 1024  # entries of logit_bias, and of stop_token_ids

RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (0, 2**63 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, MAX_LOGPROBS),
    "logit_bias": (-100, 100),
}
"""Of every numeric parameter, inclusive: wider than any client has a use for, and narrow enough
that no arithmetic on float32 logits overflows. Both fronts and the nodes check it."""
POSITIVE = frozenset({"top_p"})  # 0 itself is out of range


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, as the nodes see them; `check_sampling` says whether they are valid.

    Stop *strings* are not here: text exists only in the router, which ends the sequence by
    cancelling it. `seed` is always set (the router draws one when the client gave none), so
    that a continuation on another node draws the same numbers.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 (a client's -1 too) = all
    min_p: float = 0.0
    seed: int = 0  # unsigned 63 bit
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; k = the chosen token and the k most likely

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) of one chosen token and the most likely ones beside it."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


# ---- what may be asked for ----


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, whose `param` names the field, unless every parameter is in its
    range and every token id in the vocabulary."""
    for name in RANGES.keys() - {"logit_bias", "logprobs"}:
        _check(name, getattr(params, name))
    if params.logprobs is not None:
        _check("logprobs", params.logprobs)
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        check_count(name, ids)
        check_token_ids(ids, vocab_size, name)
    for value in params.logit_bias.values():
        _check("logit_bias", value)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}",
            param="min_tokens",
        )
    if params.min_tokens and len(set(params.stop_token_ids)) >= vocab_size:
        raise InvalidRequest(
            "min_tokens forbids every token: stop_token_ids names the whole vocabulary",
            param="min_tokens",
        )


def _check(name: str, value: float) -> None:
    check_range(name, value, *RANGES[name])


def check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    """Raises InvalidRequest unless low ≤ value ≤ high (None: no bound) and value is finite.
    A float counts as what the nodes get of it: 32 bits."""
    number, least, most = (_as_sent(each) for each in (value, low, high))
    finite = isinstance(number, int) or math.isfinite(number)
    below = least is not None and (number <= least if name in POSITIVE else number < least)
    if finite and not below and (most is None or number <= most):
        return
    bounds = "a finite number"
    if low is not None:
        bounds = f"{'greater than' if name in POSITIVE else 'at least'} {low}"
    if high is not None:
        bounds += f" and at most {high}"
    raise InvalidRequest(f"{name} must be {bounds}, not {_shown(value)}", param=name)


def _as_sent(value: Any) -> Any:
    return ctypes.c_float(value).value if isinstance(value, float) else value


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest unless all ids are in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"token id {_shown(wrong)} in {param} is not in 0…{vocab_size - 1}", param=param
        )


def check_count(name: str, given: Collection[object]) -> None:
    """Raises InvalidRequest when a field names too many tokens."""
    if len(given) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"{name} takes at most {MAX_TOKENS_NAMED} tokens", param=name)


def _shown(value: float) -> str:
    """For a message: Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
