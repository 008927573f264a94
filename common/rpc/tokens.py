"""The events of a step, as they cross from a decode node to a router: MessagePack, in
`StepEvents`.

A step makes `JobTokens` for each sequence, some hundred thousand a second on a busy router, so
they are arrays without field names, encoded and decoded by msgspec. Fields are only ever added at
the end, with a default. All other events are rare: each is a protobuf message in a `JobEvent`. One
list has both, in the order in which they happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from google.protobuf.message import DecodeError

from pdserve.common.core.request import FinishReason, TokenEvent
from pdserve.common.core.sampling import SampledToken, TokenLogprobs
from pdserve.common.rpc.pb import cluster_pb2 as pb

_FINISH = {reason.value: reason for reason in FinishReason}


class JobTokens(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=0):
    """Tokens of one choice of a job. `position` is the index of the first one in the choice's
    output, so that the router detects lost, repeated and reordered tokens."""

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


class JobEvent(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """Any other event of a job than tokens."""

    job: int  # DecodeRequest.job_number
    message: bytes  # a DecodeEvent

    def event(self) -> pb.DecodeEvent:
        """Decodes the event; raises ValueError if the bytes are something else."""
        try:
            return pb.DecodeEvent.FromString(self.message)
        except DecodeError as error:
            raise ValueError(f"an event does not parse: {error}") from None


StepEvent = JobTokens | JobEvent

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[StepEvent])


def encode_events(events: Sequence[StepEvent]) -> bytes:
    return _encoder.encode(events)


def decode_events(message: bytes) -> list[StepEvent]:
    """Decodes events; raises msgspec.DecodeError if the bytes are something else."""
    return _decoder.decode(message)
