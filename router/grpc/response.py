"""The responses of one `Generate`: what comes of its generation, as messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.router.api.chat import ChatChoices
from pdserve.router.grpc.chat import answer
from pdserve.router.requests.event_ids import EventIds
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Replayed,
    TextDelta,
    Updates,
    coalesced,
)
from pdserve.router.requests.stages import arrival_var

MAX_ENTRIES = 2**15  # a prompt's log-probabilities in one message; clients take 4 MiB


class ResponseWriter:
    """Writes deltas; the last response carries usage and timeline only."""

    def __init__(
        self,
        public_id: str,
        generation: GenerationRequest,
        choices: ChatChoices | None,
        prompt_token_ids: Sequence[int] = (),
        ids: EventIds | None = None,
    ) -> None:
        """`choices` parse a chat's. `prompt_token_ids`: for the first response, if the client
        requested them. `ids`: the event ids of a resumable stream."""
        self.id = public_id
        self._prompt = generation.prompt_token_ids
        self._choices = choices
        self._shown = prompt_token_ids
        self._ids = ids

    async def write(self, batch: Updates) -> AsyncIterator[pb.GenerateResponse]:
        if self._shown:
            yield pb.GenerateResponse(request_id=self.id, prompt_token_ids=self._shown)
            self._shown = ()
        for _, update in coalesced(batch):
            if isinstance(update, PromptLogprobs):
                for part in _prompt_parts(self._prompt, update):
                    yield await asyncio.to_thread(_prompt_response, self.id, part)
            elif isinstance(update, GenerationStats):
                yield _last_response(self.id, update, self._choices)
            elif isinstance(update, TextDelta):
                yield self._delta(update)
            elif isinstance(update, Replayed):
                answer(self.id, update.delta, self._choices)  # the client has it

    def _delta(self, delta: TextDelta) -> pb.GenerateResponse:
        response = answer(self.id, delta, self._choices)
        if self._ids is not None:
            self._ids.add(0, delta)
            response.event_id = self._ids.next()
        return response


def _prompt_parts(
    token_ids: Sequence[int], found: PromptLogprobs
) -> Iterator[tuple[Sequence[int], PromptLogprobs | None]]:
    """Splits a prompt's log-probabilities: the first token, then parts of MAX_ENTRIES at most."""
    yield token_ids[:1], None
    for part in found.split(max(1, MAX_ENTRIES // (1 + found.num_top))):
        yield token_ids[part.start : part.start + len(part)], part


def _prompt_response(
    request_id: str, part: tuple[Sequence[int], PromptLogprobs | None]
) -> pb.GenerateResponse:
    token_ids, found = part
    if found is None:
        tokens = [pb.Token(id=each) for each in token_ids]
    else:
        tokens = [
            pb.Token(
                id=token_id,
                logprob=logprob,
                rank=rank,
                top_logprobs=[pb.TopLogprob(token_id=i, logprob=p) for i, p in top],
            )
            for token_id, (logprob, rank, top) in zip(
                token_ids, found.rows(found.num_top), strict=True
            )
        ]
    return pb.GenerateResponse(request_id=request_id, prompt_logprobs=tokens)


def _last_response(
    request_id: str, stats: GenerationStats, choices: ChatChoices | None
) -> pb.GenerateResponse:
    usage = pb.Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        cached_tokens=stats.cached_tokens,
        reasoning_tokens=0 if choices is None else choices.reasoning_tokens,
    )
    arrival = arrival_var.get()
    timed = arrival is not None and arrival.wants_timeline
    timeline = convert.timeline_to_pb(stats.receipt() if timed else stats.timeline)
    return pb.GenerateResponse(request_id=request_id, usage=usage, timeline=timeline)
