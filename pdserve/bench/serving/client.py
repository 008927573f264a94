"""Sends streaming requests to an OpenAI-compatible server and records the time of each chunk."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from pdserve.bench.serving.datasets import Prompt
from pdserve.client.server import why_lost
from pdserve.common.core.printable import printable

MAX_REFUSAL = 64 * 1024  # bytes of an error response that are read
MAX_REASON = 300  # characters of its message that are kept

# ---- the fields of a stream event that are read ----


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None  # some servers send them on request
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the choice has generated tokens. The first chat chunk (a role and an empty
        text) and the last one have none."""
        delta = self.delta or Delta()
        return bool(self.text or self.token_ids or delta.content or delta.reasoning_content)


class Event(msgspec.Struct):
    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode


# ---- the record of one request ----


@dataclass(slots=True)
class Chunk:
    """Generated tokens that arrived together; `tokens` is None when the server did not say."""

    time: float
    tokens: int | None


@dataclass(slots=True)
class Record:
    """One request's measurements; times are seconds of `time.perf_counter`."""

    arrival: float  # when the schedule wanted it sent
    sent: float
    chunks: list[Chunk] = field(default_factory=list)
    finished: float | None = None  # the last event that carried a choice
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None  # the kind of failure; None: completed
    reason: str | None = None  # the message of the server or the connection


class RequestFailed(Exception):
    """The request failed. `kind` groups failures in the summary; `reason` is the message."""

    def __init__(self, kind: str, reason: str | None = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Client:
    """Sends prompts to one endpoint. `body` is merged into every request. Set `says_done=False` for
    servers that end a stream without `[DONE]`."""

    session: aiohttp.ClientSession
    url: str
    chat: bool
    body: Mapping[str, Any]
    says_done: bool = True

    async def send(self, prompt: Prompt, arrival: float | None = None) -> Record:
        """Runs one request and returns its record; a failure is recorded, not raised. Without
        `arrival` the arrival is the time of sending."""
        sent = time.perf_counter()
        record = Record(arrival=sent if arrival is None else arrival, sent=sent)
        try:
            await self._stream(prompt, record)
        except RequestFailed as failure:
            record.error, record.reason = failure.kind, failure.reason
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            record.error, record.reason = "connect", why_lost(error)
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error, record.reason = "disconnected", why_lost(error)
        return record

    async def _stream(self, prompt: Prompt, record: Record) -> None:
        async with self.session.post(self.url, json=self._payload(prompt)) as response:
            if response.status != 200:
                raise RequestFailed(f"http_{response.status}", await _refusal(response))
            async for event in _events(response, self.says_done):
                _note(record, event, time.perf_counter())
        if record.finish_reason is None:
            raise RequestFailed("truncated")

    def _payload(self, prompt: Prompt) -> dict[str, Any]:
        content: dict[str, Any] = {"prompt": prompt.prompt}
        if self.chat:
            content = {"messages": [{"role": "user", "content": prompt.prompt}]}
        return {
            **content,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Returns the message of an error response."""
    try:
        body = msgspec.json.decode(await response.content.read(MAX_REFUSAL))
    except msgspec.DecodeError:
        return response.reason or ""
    return _message(body.get("error") if isinstance(body, dict) else body)


def _message(error: Any) -> str:
    """Returns an error's message. OpenAI's errors are objects, other servers' may be strings."""
    found = error.get("message") if isinstance(error, dict) else error
    return printable(str(found or ""), MAX_REASON)


async def _events(response: aiohttp.ClientResponse, says_done: bool) -> AsyncIterator[Event]:
    """Yields the events of a server-sent event stream up to `[DONE]`.

    Raises:
        RequestFailed: an event does not match the API, or `[DONE]` is missing.
    """
    while line := await _read_line(response.content):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            yield _decode_event(data)
        except msgspec.DecodeError as error:
            raise RequestFailed("malformed") from error
    if says_done:
        raise RequestFailed("truncated")


async def _read_line(content: aiohttp.StreamReader) -> bytes:
    """Returns the next line, b"" at the end."""
    try:
        return await content.readline()
    except (LineTooLong, ValueError) as error:  # ValueError: older aiohttp
        raise RequestFailed("malformed") from error


def _note(record: Record, event: Event, now: float) -> None:
    """Adds one event to the record."""
    if event.error is not None:
        code = event.error.get("code") if isinstance(event.error, dict) else None
        raise RequestFailed(f"stream_{code or 'error'}", _message(event.error))
    if event.usage is not None:
        record.usage = event.usage
    for choice in event.choices:
        record.finished = now
        record.finish_reason = choice.finish_reason or record.finish_reason
        if choice.has_tokens:
            tokens = len(choice.token_ids) if choice.token_ids else None
            record.chunks.append(Chunk(now, tokens))
