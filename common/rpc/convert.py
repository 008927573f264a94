"""Converts messages between roles from dataclasses to protobuf and back. No logic."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import Parameter, ParamType
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import Choice, FinishReason, GenerateJob, Timeline, TokenEvent
from pdserve.common.core.sampling import (
    SAMPLING_PARAMETERS,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
)
from pdserve.common.rpc.pb import cluster_pb2 as cluster
from pdserve.common.rpc.pb import inference_pb2 as inference

_FINISH_TO_PB = {
    None: inference.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_to_pb(params: SamplingParams) -> inference.SamplingParams:
    values = {each.name: getattr(params, each.name) for each in SAMPLING_PARAMETERS}
    for each in SAMPLING_PARAMETERS:
        if each.kind is ParamType.TOKEN_ID_LISTS:
            values[each.name] = [inference.TokenIds(ids=ids) for ids in values[each.name]]
    return inference.SamplingParams(**values)


def sampling_from_pb(message: inference.SamplingParams) -> SamplingParams:
    """Reads all fields; routers fill in the defaults. Only the logprobs fields may be absent."""
    values = {each.name: _from_pb(each, message) for each in SAMPLING_PARAMETERS}
    for name in ("logprobs", "prompt_logprobs"):
        if not message.HasField(name):
            values[name] = None
    return SamplingParams(**values)


def _from_pb(parameter: Parameter, message: inference.SamplingParams) -> Any:
    value = getattr(message, parameter.name)
    match parameter.kind:
        case ParamType.TOKEN_IDS:
            return tuple(value)
        case ParamType.TOKEN_ID_LISTS:
            return tuple(tuple(each.ids) for each in value)
        case ParamType.BIASES:
            return dict(value)
        case _:
            return value


def fields_set(message: inference.SamplingParams) -> dict[str, Any]:
    """Returns name → value of the fields that a client has set."""
    return {field.name: value for field, value in message.ListFields()}


def job_to_pb(job: GenerateJob) -> cluster.Job:
    return cluster.Job(
        request_id=job.request_id,
        prompt_token_ids=job.prompt_token_ids,
        sampling=sampling_to_pb(job.sampling),
        choices=[
            cluster.Choice(index=choice.index, output_token_ids=choice.output_token_ids)
            for choice in job.choices
        ],
        cache_salt=job.cache_salt,
        adapter=job.adapter,
        timed=job.timed,
        priority=job.priority,
        client=job.client,
        router=job.router,
        orphan_key=job.orphan_key,
    )


def job_from_pb(message: cluster.Job) -> GenerateJob:
    """Reads a job; raises InvalidRequest if it has no prompt or no choice."""
    if not message.prompt_token_ids or not message.choices:
        raise InvalidRequest("the job has no prompt or no choice", param="prompt")
    return GenerateJob(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_pb(message.sampling),
        choices=tuple(
            Choice(choice.index, tuple(choice.output_token_ids)) for choice in message.choices
        ),
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        timed=message.timed,
        priority=message.priority,
        client=message.client,
        router=message.router,
        orphan_key=message.orphan_key,
    )


def token_to_pb(token: SampledToken) -> inference.Token:
    if token.logprobs is None:
        return inference.Token(id=token.token_id)
    top = [inference.TopLogprob(token_id=i, logprob=p) for i, p in token.logprobs.top]
    return inference.Token(id=token.token_id, logprob=token.logprobs.logprob, top_logprobs=top)


def token_from_pb(message: inference.Token) -> SampledToken:
    if not message.HasField("logprob"):
        return SampledToken(message.id)
    top = tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs)
    return SampledToken(message.id, TokenLogprobs(message.logprob, top))


def prompt_to_pb(found: PromptLogprobs | None) -> cluster.PromptLogprobs | None:
    if found is None:
        return None
    return cluster.PromptLogprobs(
        num_top=found.num_top,
        logprobs=found.logprobs,
        ranks=found.ranks,
        top_token_ids=found.top_token_ids,
        top_logprobs=found.top_logprobs,
    )


def prompt_from_pb(message: cluster.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        start=1,
        num_top=message.num_top,
        logprobs=message.logprobs,
        ranks=message.ranks,
        top_token_ids=message.top_token_ids,
        top_logprobs=message.top_logprobs,
    )


def finish_to_pb(reason: FinishReason | None) -> inference.FinishReason:
    return _FINISH_TO_PB[reason]


def event_to_pb(event: TokenEvent) -> cluster.TokenEvent:
    return cluster.TokenEvent(
        choice=event.choice,
        tokens=[token_to_pb(token) for token in event.tokens],
        finish_reason=_FINISH_TO_PB[event.finish_reason],
        stop_token_id=event.stop_token_id,
    )


def event_from_pb(message: cluster.TokenEvent) -> TokenEvent:
    return TokenEvent(
        choice=message.choice,
        tokens=tuple(token_from_pb(token) for token in message.tokens),
        # An unknown reason from a later version still means that the choice has ended.
        finish_reason=_FINISH_FROM_PB.get(message.finish_reason, FinishReason.STOP),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def timeline_to_pb(timeline: Timeline) -> inference.Timeline:
    """Converts a timeline; the field names are the same."""
    return inference.Timeline(**asdict(timeline))
