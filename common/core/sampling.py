"""What a node is told of a request and what it answers: how the next token is chosen and when a
sequence ends; tokens and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import PARAMETERS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Those that nodes must know, by the same names; `check_sampling` says whether they are valid.

    Texts are not here, for they exist only in the router: it encodes bad words, and ends a sequence
    with a stop string by cancelling it. `seed` is always set (the router draws one when the client
    gave none), so that a continuation on another node draws the same numbers.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # never -1: the router has made that 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # none: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: not even of the chosen token
    grammar: str = ""  # of the whole output, as `common/text/grammar.py` words it; none: any
    prompt_logprobs: int | None = None  # beside each prompt token; None: none of the prompt

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
        """Whether choosing a token needs the tokens before it."""
        return self.penalised or bool(self.bad_words_token_ids or self.grammar)

    @property
    def speculates(self) -> bool:
        """Whether several tokens may be drawn in one step: none depends on those before it but
        through the model."""
        return not self.needs_history


SAMPLING_PARAMETERS = tuple(PARAMETERS[each.name] for each in fields(SamplingParams))


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, whose `param` names the field, unless every parameter is in its
    range and every token id in the vocabulary. The router checks it, and the nodes again."""
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
            "min_tokens forbids every token: stop_token_ids names all that may come",
            param="min_tokens",
        )


# ---- what a node answers ----


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
