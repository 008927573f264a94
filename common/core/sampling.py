"""Sampling parameters as nodes get them, and sampled tokens with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import msgspec

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import PARAMETERS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters that nodes need; `check_sampling` validates them.

    Parameters with text are handled by the router alone: it encodes bad words, and cancels a
    sequence at a stop string. `seed` is always set (the router draws one if the client gave none),
    so that a continuation on another node draws the same numbers.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all; the router turns -1 into 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; None: no logprobs at all
    grammar: str = ""  # the whole output matches it (format: `common/text/grammar.py`); "": none
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether sampling a token needs the tokens before it."""
        return self.penalised or bool(self.bad_words_token_ids or self.grammar)

    @property
    def needs_host(self) -> bool:
        """Whether the host must know each token before the next can be sampled."""
        return bool(self.bad_words_token_ids or self.grammar)

    @property
    def speculates(self) -> bool:
        """Whether several tokens may be drawn in one step: each depends on earlier tokens only
        through the model."""
        return not self.needs_history


SAMPLING_PARAMETERS = tuple(PARAMETERS[each.name] for each in fields(SamplingParams))


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, with the field as `param`, unless every parameter is in its range and
    every token id in the vocabulary. The router checks this, and each node again."""
    for parameter in SAMPLING_PARAMETERS:
        parameter.check(getattr(params, parameter.name), vocab_size)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}",
            param="min_tokens",
        )
    stops, allowed = set(params.stop_token_ids), set(params.allowed_token_ids)
    if params.min_tokens and (stops >= allowed if allowed else len(stops) >= vocab_size):
        raise InvalidRequest(
            "min_tokens forbids every token: stop_token_ids has all allowed tokens",
            param="min_tokens",
        )


# ---- results ----


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of a chosen token and of the most likely alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class SampledToken(msgspec.Struct, frozen=True):
    """One generated token. This is a `Struct` because one is made for every token: making a frozen
    dataclass takes ten times as long."""

    token_id: int
    logprobs: TokenLogprobs | None = None
