"""Clients of several routers of one cluster, whose answers outlive the router that serves them.

    client = ResumingClient(["http://10.0.0.1:8000", "http://10.0.0.9:8000"], api_key)
    for chunk in client.stream("/v1/completions", {"model": "m", "prompt": "Once"}):
        print(chunk["choices"][0]["text"], end="")

The chunks are those of one uninterrupted stream. Stream events have ids. When a stream breaks off,
the client sends the same body, with the ids that it has received, to the next router, which streams
the rest (`router/requests/event_ids.py`). A request that is not streamed has an Idempotency-Key, by
which the next router finds what has been computed of its answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from http.client import HTTPException, HTTPResponse
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request
from uuid import uuid4

import aiohttp

from pdserve.client.server import Answer, client_session, encode
from pdserve.client.watch import CONNECT, Watch, watched
from pdserve.common.core.errors import (
    ConfigError,
    Conflict,
    Overloaded,
    PdserveError,
    Unavailable,
)
from pdserve.common.core.printable import printable

Chunk = dict[str, Any]

PATIENCE = 30.0  # seconds without a new event after which a stream fails
PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds between two tries
SILENCE = 60.0  # seconds without a byte after which a stream's router counts as dead in any case
KEY_HEADER = "Idempotency-Key"
JSON = {"Content-Type": "application/json"}
LONGEST = 600.0  # seconds that a whole answer may take


class Progress:
    """Tracks the received part of one stream and builds the next request; without I/O."""

    def __init__(self, body: Mapping[str, Any], patience: float) -> None:
        self._body = {**body, "stream": True, "resumable": True}
        self._patience = patience
        self._ids: list[str] = []
        self._since: float | None = None  # the first failure after the last event
        self.done = False
        self.begin()

    def begin(self) -> bytes:
        """Returns the body of the next request; drops events that came without an id."""
        self._held: list[Chunk] = []
        self._chunk: Chunk | None = None
        self._id: str | None = None
        return encode({**self._body, "resume": self._ids} if self._ids else self._body)

    def take(self, line: bytes) -> list[Chunk]:
        """Takes a line of the stream; returns the chunks that are final.

        Raises:
            PdserveError: the router says that the stream has failed.
        """
        name, _, value = line.rstrip(b"\r\n").partition(b": ")
        if name == b"id":
            self._id = value.decode()
        elif name == b"data":
            self.done = value == b"[DONE]"
            self._chunk = None if self.done else json.loads(value)
            if self._chunk is not None and "error" in self._chunk:
                raise _error(self._chunk)
        elif not name:
            return self._event()
        return []

    def _event(self) -> list[Chunk]:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._held.append(chunk)
        if self._id is None and not self.done:
            return []
        if self._id is not None:
            self._ids.append(self._id)
            self._id = None
        self._since = None
        held, self._held = self._held, []
        return held

    def failed(self, error: Exception) -> float:
        """Returns the seconds to wait before the next try.

        Raises:
            Exception: `error`, because another try would not help, or too much time has passed.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not _may_pass(error) or now - self._since > self._patience:
            raise error
        return _pause(error)


class Tries:
    """Tracks the tries for one answer that is not streamed; without I/O."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since = self._begun = time.monotonic()

    def begin(self) -> None:
        self._begun = time.monotonic()

    def failed(self, error: Exception) -> float:
        """Like `Progress.failed`; a long try counts as progress: the router was serving it."""
        now = time.monotonic()
        if now - self._begun > self._patience:
            self._since = now
        if not _may_pass(error) or now - self._since > self._patience:
            raise error
        return _pause(error)


class ResumingClient:
    """A client for threads; each stream has its own connections."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None = None, patience: float = PATIENCE
    ) -> None:
        """`urls`: of the routers, without /v1. A stream fails when tries have brought no new event
        for `patience` seconds."""
        self._urls = _checked(urls)
        self._headers = dict(JSON)
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._patience = patience
        self._turn = 0

    def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[Chunk]:
        """Yields the chunks of `/v1/completions` or `/v1/chat/completions`. `headers`: additional
        ones for each try, such as X-Request-Id.

        Raises:
            PdserveError: a router refuses the request, or says that it has failed.
            OSError, HTTPException: no router has answered for as long as `patience`.
        """
        progress = Progress(body, self._patience)
        while not progress.done:
            turn = self._turn
            try:
                url = self._urls[turn % len(self._urls)]
                yield from self._once(url, path, progress, headers or {})
            except (OSError, HTTPException, PdserveError) as error:
                pause = progress.failed(error)
                if self._turn == turn:  # else another stream has already switched routers
                    self._turn += 1
                time.sleep(pause)

    def complete(
        self,
        path: str,
        body: Mapping[str, Any],
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the whole answer of `/v1/completions` or `/v1/chat/completions`. If its router
        dies, the next one continues the work. Arguments and errors are those of `stream`."""
        key = idempotency_key or uuid4().hex
        headers = {**(headers or {}), **self._headers, KEY_HEADER: key}
        tries = Tries(self._patience)
        while True:
            turn = self._turn
            try:
                tries.begin()
                url = self._urls[turn % len(self._urls)]
                request = Request(url + path, encode(body), headers)
                with Watch(url) as watch, _opened(request, watch, LONGEST) as response:
                    answer: dict[str, Any] = json.load(response)
                    return answer
            except (OSError, HTTPException, PdserveError) as error:
                pause = tries.failed(error)
                if self._turn == turn:
                    self._turn += 1
                time.sleep(pause)

    def _once(
        self, url: str, path: str, progress: Progress, headers: Mapping[str, str]
    ) -> Iterator[Chunk]:
        request = Request(url + path, progress.begin(), {**headers, **self._headers})
        with Watch(url) as watch, _opened(request, watch, SILENCE) as response:
            for line in response:
                watch.heard()
                yield from progress.take(line)
        if not progress.done:
            raise ConnectionError(f"{url} broke off its answer")


class AsyncResumingClient:
    """A client for an event loop. Use it as an async context manager."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None = None, patience: float = PATIENCE
    ) -> None:
        """Takes the arguments of `ResumingClient`."""
        self._urls = _checked(urls)
        self._api_key = api_key
        self._patience = patience
        self._turn = 0

    async def __aenter__(self) -> Self:
        self._session = client_session(self._api_key)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks as `ResumingClient.stream` does.

        Raises:
            PdserveError: a router refuses the request, or says that it has failed.
            aiohttp.ClientError, OSError: no router has answered for as long as `patience`.
        """
        progress = Progress(body, self._patience)
        while not progress.done:
            turn = self._turn
            try:
                url = self._urls[turn % len(self._urls)]
                once = self._once(url, path, progress, headers or {})
                async with aclosing(once) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except (aiohttp.ClientError, OSError, PdserveError) as error:
                await self._next_router(turn, progress.failed(error))

    async def complete(
        self,
        path: str,
        body: Mapping[str, Any],
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the whole answer as `ResumingClient.complete` does. Raises as `stream` does."""
        key = idempotency_key or uuid4().hex
        headers = {**(headers or {}), **JSON, KEY_HEADER: key}
        timeout = aiohttp.ClientTimeout(total=LONGEST, sock_connect=CONNECT)
        tries = Tries(self._patience)
        while True:
            turn = self._turn
            try:
                tries.begin()
                url = self._urls[turn % len(self._urls)]
                post = self._session.post(
                    url + path, data=encode(body), headers=headers, timeout=timeout
                )
                return await watched(_whole(post), self._session, url)
            except (aiohttp.ClientError, OSError, PdserveError) as error:
                await self._next_router(turn, tries.failed(error))

    async def _next_router(self, turn: int, pause: float) -> None:
        """Waits; the next try goes to another router, unless a concurrent request moved on."""
        if self._turn == turn:
            self._turn += 1
        await asyncio.sleep(pause)

    async def _once(
        self, url: str, path: str, progress: Progress, headers: Mapping[str, str]
    ) -> AsyncGenerator[Chunk, None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)
        post = self._session.post(
            url + path, data=progress.begin(), headers={**headers, **JSON}, timeout=timeout
        )
        response, rest = await watched(post, self._session, url), b""
        async with response:
            await _check(response)
            # Unlike lines, pieces have no size limit.
            while piece := await watched(response.content.readany(), self._session, url):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    for chunk in progress.take(line):
                        yield chunk
        if not progress.done:
            raise ConnectionError(f"{url} broke off its answer")


def _checked(urls: Sequence[str]) -> list[str]:
    if isinstance(urls, str) or not urls:
        raise ConfigError("urls: give a list of the routers' URLs, one at least")
    return [url.rstrip("/").removesuffix("/v1") for url in urls]


def _opened(request: Request, watch: Watch, timeout: float) -> HTTPResponse:
    """Returns the open response; raises PdserveError if the request was refused."""
    try:
        return watch.open(request, timeout)
    except HTTPError as error:
        with error:
            after = error.headers.get("Retry-After")
            raise _refusal(error.code, error.read(), after) from None


async def _whole(post: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
    async with post as response:
        await _check(response)
        answer: dict[str, Any] = await response.json()
        return answer


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises PdserveError if the request was refused."""
    if response.status >= 400:
        after = response.headers.get("Retry-After")
        raise _refusal(response.status, await response.read(), after)


def _may_pass(error: Exception) -> bool:
    """Returns whether another try may help."""
    if isinstance(error, PdserveError):
        return isinstance(error, Overloaded | Unavailable | Conflict)
    return True


def _pause(error: Exception) -> float:
    """Returns the seconds to wait before the next try."""
    after = error.retry_after if isinstance(error, PdserveError) else None
    return min(after or PAUSE, LONGEST_PAUSE)


PROXYS_OWN = (502, 504)  # statuses of a proxy whose router died or does not answer; without JSON


def _refusal(status: int, body: bytes, retry_after: str | None) -> PdserveError:
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
        if status in PROXYS_OWN:
            return Unavailable(f"a proxy answered {status}: {printable(found, 200)}")
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return Answer(status, found, "", seconds).error()


def _error(event: Chunk) -> PdserveError:
    """Returns the error of an event; retryable only if the router is stopping."""
    found: Any = event["error"]
    code = found.get("code") if isinstance(found, dict) else None
    return Answer(503 if code == "shutting_down" else 500, event, "").error()
