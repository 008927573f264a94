"""The tokens of a step from a decode node to the router: MessagePack, in `StepTokens`.

There is one entry per sequence and step, about a hundred thousand per second on a busy router, so
entries are msgspec arrays without field names. New fields go to the end, with a default.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.core.request import FinishReason, TokenEvent
from pdserve.common.core.sampling import SampledToken, TokenLogprobs

_FINISH = {reason.value: reason for reason in FinishReason}


class JobTokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Tokens of one choice of a job. `position`: index of the first one in the choice's output,
    which reveals lost, repeated and reordered entries."""

    job: int  # DecodeRequest.job_number
    choice: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    # Per token, if requested: its own, and the most likely ones as (id, logprob).
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None = None
    # Of a timed job, seconds on this node: in steps, preempted, total.
    times: tuple[float, float, float] | None = None

    @classmethod
    def of(
        cls,
        job: int,
        position: int,
        event: TokenEvent,
        times: tuple[float, float, float] | None = None,
    ) -> JobTokens:
        tokens = event.tokens
        logprobs = None
        if tokens and tokens[0].logprobs is not None:
            logprobs = tuple(
                (each.logprobs.logprob, each.logprobs.top) for each in tokens if each.logprobs
            )
        return cls(
            job,
            event.choice,
            position,
            tuple([each.token_id for each in tokens]),
            event.finish_reason,
            event.stop_token_id,
            logprobs,
            times,
        )

    def event(self) -> TokenEvent:
        """Returns the event; raises ValueError if only some tokens have logprobs."""
        if self.logprobs is None:
            tokens = tuple([SampledToken(each) for each in self.token_ids])
        else:
            tokens = tuple(
                SampledToken(each, TokenLogprobs(logprob, top))
                for each, (logprob, top) in zip(self.token_ids, self.logprobs, strict=True)
            )
        reason = self.finish_reason
        # An unknown reason from a later version still means that the choice has ended.
        finish = None if reason is None else _FINISH.get(reason, FinishReason.STOP)
        return TokenEvent(self.choice, tokens, finish, self.stop_token_id)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[JobTokens])


def encode_tokens(tokens: Sequence[JobTokens]) -> bytes:
    return _encoder.encode(tokens)


def decode_tokens(message: bytes) -> list[JobTokens]:
    """Decodes a message; raises msgspec.DecodeError."""
    return _decoder.decode(message)
