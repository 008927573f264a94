"""Sends requests over HTTP and gRPC, and collects everything in the answers."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import grpc

from benchmarks.soak.asks import Ask
from pdserve.client.resuming import AsyncResumingClient
from pdserve.client.resuming_grpc import AsyncResumingStub
from pdserve.common.core.errors import PdserveError
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

TIMELINE = {"X-Pdserve-Timeline": "1"}
LOGPROB_TOLERANCE = 1e-3  # batches differ, and so does the order of summation


class Lost(Exception):
    """The client got an error, which the message contains. `broken`: the connection ended."""

    def __init__(self, message: str, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


@dataclass(slots=True)
class Choice:
    """The concatenated output of one choice."""

    text: str = ""
    tokens: list[str | int] = field(default_factory=list)  # ids over gRPC; else with logprobs
    logprobs: list[float] = field(default_factory=list)
    finish: tuple[Any, Any] = (None, None)  # the reason, and the stop string or token


@dataclass(slots=True)
class Answer:
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    completion_tokens: int = 0
    migrations: int = 0
    times: list[float] = field(default_factory=list)  # arrival times of tokens

    def longest_gap(self, stood_still: Callable[[float, float], float]) -> float:
        """Returns the longest time between two events with tokens, in seconds, without the time in
        which no node could serve; 0 if there was only one event."""
        return max(
            (later - sooner - stood_still(sooner, later) for sooner, later in pairwise(self.times)),
            default=0.0,
        )


def difference(expected: Answer, got: Answer) -> str:
    """Describes how two answers to one request differ; empty if they are equal."""
    if expected.choices.keys() != got.choices.keys():
        return f"choices {sorted(got.choices)} ≠ {sorted(expected.choices)}"
    for index, choice in sorted(expected.choices.items()):
        for name in ("text", "tokens", "finish"):
            ours, theirs = getattr(choice, name), getattr(got.choices[index], name)
            if ours != theirs:
                return f"{name} of choice {index}: {theirs!r} ≠ {ours!r}"
        if not _close(choice.logprobs, got.choices[index].logprobs):
            return f"logprobs of choice {index}"
    if expected.completion_tokens != got.completion_tokens:
        return f"usage: {got.completion_tokens} ≠ {expected.completion_tokens}"
    return ""


def _close(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


class Client:
    """All requests of a run, over one HTTP session and one gRPC channel."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        channel: grpc.aio.Channel,
        key: Mapping[str, str],
        resuming: tuple[AsyncResumingClient, AsyncResumingStub] | None = None,
    ) -> None:
        """`key`: the API key as a header. `resuming`, if given, sends the requests instead, over
        HTTP and gRPC, through any of its routers."""
        self._resuming = resuming
        self._session = session
        self._key = dict(key)
        self._url = f"{url}/v1/completions"
        self._stub = pb_grpc.InferenceStub(channel)

    async def send(self, ask: Ask, request_id: str = "", answer: Answer | None = None) -> Answer:
        """Waits for the whole answer; cancelling hangs up. `request_id`: the id sent to the router.
        `answer`: filled while the answer arrives.

        Raises:
            Lost: the answer was or ended with an error.
        """
        send = {"streamed": self._streamed, "whole": self._whole, "grpc": self._grpc}[ask.way]
        if self._resuming is not None:
            client, stub = self._resuming
            over_grpc = ask.way == "grpc"
            send = partial(_resumed_grpc, stub) if over_grpc else partial(_resumed, client)
        answer = Answer() if answer is None else answer
        try:
            await send(ask, answer, {"X-Request-Id": request_id} if request_id else {})
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Lost(f"{ask.way}: {error!r}", broken=True) from error
        except PdserveError as error:
            raise Lost(f"{ask.way}: {error}") from error
        except grpc.aio.AioRpcError as error:
            codes = {key for key, _ in error.trailing_metadata() or ()}
            raise Lost(
                f"{ask.way}: {error.code().name}: {error.details()}",
                broken="pdserve-error-code" not in codes,
            ) from error
        return answer

    async def _whole(self, ask: Ask, answer: Answer, headers: Mapping[str, str]) -> None:
        async with self._post(ask, headers) as response:
            _note(answer, await response.json())

    async def _streamed(self, ask: Ask, answer: Answer, headers: Mapping[str, str]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._post(ask, headers, **options) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _note(answer, json.loads(line[6:]))
                elif line == b"data: [DONE]\n":
                    return
        raise Lost("streamed: ended without [DONE]", broken=True)

    @asynccontextmanager
    async def _post(
        self, ask: Ask, headers: Mapping[str, str], **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = {"prompt": ask.prompt, **ask.options, **more}
        headers = {**TIMELINE, **self._key, **headers}
        async with self._session.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                raise Lost(f"{ask.way}: HTTP {response.status}: {await response.text()}")
            yield response

    async def _grpc(self, ask: Ask, answer: Answer, headers: Mapping[str, str]) -> None:
        request = _request(ask, headers)
        call = self._stub.Generate(request, metadata=tuple(self._key.items()))
        try:
            async for response in call:
                _note_grpc(answer, response)
        finally:
            call.cancel()


async def _resumed(
    client: AsyncResumingClient, ask: Ask, answer: Answer, headers: Mapping[str, str]
) -> None:
    """Sends a request with the resuming client. Raises Lost, never `broken`."""
    body = {"prompt": ask.prompt, **ask.options, "timeline": True}
    try:
        if ask.way == "whole":
            _note(answer, await client.complete("/v1/completions", body, headers=headers))
            return
        body["stream_options"] = {"include_usage": True}
        async with aclosing(client.stream("/v1/completions", body, headers)) as chunks:
            async for chunk in chunks:
                _note(answer, chunk)
    except (aiohttp.ClientError, OSError) as error:
        raise Lost(f"resumed: {error!r}") from error


async def _resumed_grpc(
    stub: AsyncResumingStub, ask: Ask, answer: Answer, headers: Mapping[str, str]
) -> None:
    """Like `_resumed`, over gRPC."""
    try:
        async with aclosing(stub.generate(_request(ask, headers))) as responses:
            async for response in responses:
                _note_grpc(answer, response)
    except grpc.RpcError as error:
        raise Lost(f"resumed: {error!r}") from error


def _request(ask: Ask, headers: Mapping[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ask.prompt),
        sampling=pb.SamplingParams(**ask.options),
        request_id=headers.get("X-Request-Id", ""),
    )


def _note(answer: Answer, event: Mapping[str, Any]) -> None:
    """Adds an event of a stream, or a whole answer."""
    if "error" in event:
        raise Lost(f"in the stream: {event['error']}")
    for each in event["choices"]:
        choice, logprobs = answer.choices[each["index"]], each["logprobs"] or {}
        choice.text += each["text"]
        choice.tokens += logprobs.get("tokens", ())
        choice.logprobs += logprobs.get("token_logprobs", ())
        if each["finish_reason"]:
            choice.finish = (each["finish_reason"], each["stop_reason"])
        answer.times.append(time.monotonic())
    if usage := event.get("usage"):
        answer.completion_tokens = usage["completion_tokens"]
        answer.migrations = event["pdserve"]["timeline"]["migrations"]


def _note_grpc(answer: Answer, response: pb.GenerateResponse) -> None:
    if response.HasField("usage"):
        answer.completion_tokens = response.usage.completion_tokens
        answer.migrations = response.timeline.migrations
        return
    choice = answer.choices[response.index]
    choice.text += response.text
    choice.tokens += (token.id for token in response.tokens)
    choice.logprobs += (token.logprob for token in response.tokens if token.HasField("logprob"))
    if response.finish_reason:
        choice.finish = (response.finish_reason, response.stop_reason)
    answer.times.append(time.monotonic())
