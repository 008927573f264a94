"""How a sequence's next token is chosen and when the sequence ends."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20  # beside the chosen token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters, as the nodes see them.

    Stop *strings* are not here: text exists only in the router, which ends the sequence by
    cancelling it. `seed` is always set (the router draws one when the client gave none), so
    that a continuation on another node draws the same numbers.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = all
    min_p: float = 0.0  # [0, 1]
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
