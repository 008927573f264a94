"""One streaming request to an OpenAI-compatible server, timed at every chunk."""

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

MAX_REFUSAL = 64 * 1024  # bytes of a refusal that are read
MAX_REASON = 300  # characters of what it says that are kept

# ---- the parts of a stream event that are read ----


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None  # some servers send them on request
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether generated tokens came with it. The first chat chunk (a role and an empty
        text) and the closing one carry none."""
        delta = self.delta or Delta()
        return bool(self.text or self.token_ids or delta.content or delta.reasoning_content)


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode


# ---- what one request leaves behind ----


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
    error: str | None = None  # its kind; None: completed
    reason: str | None = None  # of the error, as the server or the connection said it


class RequestFailed(Exception):
    """The request failed; `kind` is what failures are counted by, `reason` what was said."""

    def __init__(self, kind: str, reason: str | None = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Client:
    """Sends prompts to one endpoint. `body` is merged into every request. Without `says_done` a
    stream may end without `[DONE]`, as some servers' do."""

    session: aiohttp.ClientSession
    url: str
    chat: bool
    body: Mapping[str, Any]
    says_done: bool = True

    async def send(self, prompt: Prompt, arrival: float | None = None) -> Record:
        """Runs one request to its end; failures are recorded, never raised. Without
        `arrival` the request arrives when it is sent."""
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
    """The reason that a refusal gives."""
    try:
        body = msgspec.json.decode(await response.content.read(MAX_REFUSAL))
    except msgspec.DecodeError:
        return response.reason or ""
    return _message(body.get("error") if isinstance(body, dict) else body)


def _message(error: Any) -> str:
    """OpenAI's errors are objects, others' may be texts."""
    found = error.get("message") if isinstance(error, dict) else error
    return printable(str(found or ""), MAX_REASON)


async def _events(response: aiohttp.ClientResponse, says_done: bool) -> AsyncIterator[Event]:
    """The events of a server-sent event stream, up to `[DONE]`.

    Raises:
        RequestFailed: an event is not what the API defines, or there is no `[DONE]`.
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
    """The next line; b"" at the end."""
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
