"""A client of a server's HTTP API: JSON, event streams, and failures as typed errors."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pdserve.client.terminal import positive
from pdserve.common.core import errors
from pdserve.common.core.errors import (
    Blame,
    ConfigError,
    InvalidRequest,
    NodeError,
    PdserveError,
    Unavailable,
)
from pdserve.common.core.printable import printable

LOOK_TIMEOUT = 10.0  # seconds, for a request that only reads state
DEFAULT_URL, URL_HELP = "http://127.0.0.1:8000", "the server; its key is OPENAI_API_KEY"
OPERATOR_URL_HELP = "the server; its key is PDSERVE_ADMIN_API_KEY, else OPENAI_API_KEY"
CLIENT_KEY, OPERATOR_KEY = "OPENAI_API_KEY", "PDSERVE_ADMIN_API_KEY"
CONNECT_TIMEOUT = 10.0  # seconds
MAX_MESSAGE = 2000  # characters of a server's error message that are kept
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 15.0  # seconds

_CLASSES: dict[int, type[PdserveError]] = {
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.ModelNotFound,
    409: errors.Conflict,
    410: errors.Gone,
    413: errors.RequestTooLarge,
    422: errors.KeyReused,
    429: errors.Overloaded,
    499: errors.Cancelled,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer with any status."""

    status: int
    body: Any  # decoded JSON, or text if it is not JSON
    request_id: str
    retry_after: float | None = None  # seconds

    def error(self) -> PdserveError:
        """Returns the typed error for a status other than 2xx."""
        found = self.body.get("error") if isinstance(self.body, dict) else None
        found = found if isinstance(found, dict) else {}
        default = InvalidRequest if 400 <= self.status < 500 else NodeError
        code, param = found.get("code"), found.get("param")
        return _CLASSES.get(self.status, default)(
            printable(str(found.get("message") or f"HTTP {self.status}: {self.body}"), MAX_MESSAGE),
            code=printable(code, 64).upper() if isinstance(code, str) else None,
            param=param if isinstance(param, str) else None,
            retry_after=self.retry_after,
        )


class Server:
    """The server at `url` (without /v1). The caller owns `session`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Raises ConfigError if `url` is not an http(s) URL."""
        self._session = session
        self.url = url.rstrip("/").removesuffix("/v1")
        if not _is_server(self.url):
            raise ConfigError(f"{url!r} is not the URL of a server, such as {DEFAULT_URL}")

    async def get(self, path: str, *, tries: int = 1) -> Any:
        """Returns the JSON at `path`. Retryable failures are tried again with growing pauses, up to
        `tries` requests.

        Raises:
            PdserveError: the server answered with an error, or not at all (Unavailable).
        """
        return _checked(await self._ask("GET", path, None, None, tries))

    async def post(
        self, path: str, body: Any, *, tries: int = 1, headers: Mapping[str, str] | None = None
    ) -> Any:
        """POSTs `body`; else like `get`."""
        return _checked(await self.ask(path, body, tries=tries, headers=headers))

    async def ask(
        self, path: str, body: Any, *, tries: int = 1, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """POSTs `body` and returns the answer, with any status, after up to `tries` requests.

        Raises:
            Unavailable: the server cannot be reached.
        """
        data = body if isinstance(body, bytes) else encode(body)
        return await self._ask("POST", path, data, headers, tries)

    async def _ask(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        tries: int,
    ) -> Answer:
        backoff = FIRST_BACKOFF
        for left in reversed(range(tries)):
            try:
                async with self._call(method, path, data, headers) as response:
                    answer = await _answer(response)
                if answer.status < 400 or not answer.error().retryable or not left:
                    return answer
                pause = answer.retry_after or 0.0
            except Unavailable:
                if not left:
                    raise
                pause = 0.0
            await asyncio.sleep(max(pause, backoff * random.uniform(0.5, 1.0)))
            backoff = min(2 * backoff, LAST_BACKOFF)
        raise AssertionError("tries is at least 1")

    async def stream(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of a streamed answer up to [DONE].

        Raises:
            PdserveError: the server answered with an error, before or within the stream, or the
                stream ended early.
        """
        async with self._call("POST", path, encode(body), headers) as response:
            if response.status != 200:
                raise (await _answer(response)).error()
            async for data in _events(response):
                if data == b"[DONE]":
                    return
                event = _json(data)
                if isinstance(event, dict) and event.get("error"):
                    raise Answer(500, event, "").error()
                if not isinstance(event, dict):
                    raise NodeError(f"the server sent no JSON: {printable(str(event), 100)}")
                yield event
        raise NodeError("the stream ended without [DONE]", code="TRUNCATED")

    async def model(self) -> str:
        """Returns the id of the first model that the server lists."""
        return str((await self.models())[0]["id"])

    async def models(self) -> list[dict[str, Any]]:
        """Returns the entries of /v1/models, at least one."""
        found = await self.get("/v1/models")
        try:
            cards = [{**card, "id": str(card["id"])} for card in found["data"]]
        except (LookupError, TypeError) as error:
            raise NodeError(f"{self.url}/v1/models lists no model") from error
        if not cards:
            raise NodeError(f"{self.url}/v1/models lists no model")
        return cards

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        kind = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers={**kind, **(headers or {})}
            ) as response:
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            began = isinstance(error, aiohttp.ClientPayloadError)
            what = "broke off its answer" if began else "does not answer"
            raise Unavailable(
                f"{self.url} {what}: {why_lost(error)}",
                code="TRUNCATED" if began else "CONNECT_FAILED",
                blame=Blame.NETWORK,
            ) from error
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"{self.url} took too long to answer") from error


def why_lost(error: Exception) -> str:
    """Explains in plain words why a connection failed or ended: aiohttp's own messages print
    argument names."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted: {printable(str(error.certificate_error), 200)}"
        case aiohttp.ClientSSLError():
            return "TLS failed; if the server has no TLS, use http://"
        case aiohttp.ClientConnectorDNSError():
            return f"the host {printable(error.host, 200)} is unknown"
        case aiohttp.ClientConnectorError(os_error=OSError(errno=errno.ECONNREFUSED)):
            return f"nothing listens on port {error.port} of {printable(error.host, 200)}"
        case aiohttp.ClientConnectorError(os_error=OSError(errno=int(number))):
            return os.strerror(number)
        case aiohttp.ServerTimeoutError():
            return f"no connection within {CONNECT_TIMEOUT:g} s"
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "the server closed the connection"
    return printable(str(error) or type(error).__name__, 200)


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is out of range
        return False


def client_session(
    api_key: str | None = None, *, verify: bool = True, timeout: float | None = None
) -> aiohttp.ClientSession:
    """Returns a session with an optional bearer key. `timeout`: seconds for a whole answer (None:
    no limit). `verify=False` accepts any certificate, for a server of our own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def add_server_options(
    parser: argparse.ArgumentParser, timeout: float, *, operators: bool = False
) -> None:
    """Adds --url and --timeout, which `session_of` reads. With `operators` the session sends the
    admin key if there is one."""
    help = OPERATOR_URL_HELP if operators else URL_HELP
    parser.add_argument("--url", default=DEFAULT_URL, help=help)
    parser.add_argument("--timeout", type=positive, default=timeout, help="seconds for one answer")
    parser.set_defaults(operators=operators)


def session_of(options: argparse.Namespace) -> aiohttp.ClientSession:
    key = key_from_environment(OPERATOR_KEY) if options.operators else None
    return client_session(key or key_from_environment(), timeout=options.timeout)


def key_from_environment(name: str = CLIENT_KEY) -> str | None:
    """Returns the API key in the variable `name`, if any; the first one of a comma-separated
    PDSERVE_ADMIN_API_KEY.

    Raises:
        ConfigError: the key has characters that an HTTP header cannot hold.
    """
    key = os.environ.get(name, "")
    if name == OPERATOR_KEY:
        key = key.partition(",")[0]
    key = key.strip()  # keys read from a file end with a newline
    if not key.isprintable():
        raise ConfigError(f"{name} contains a character that keys cannot have")
    return key or None


def encode(body: Any) -> bytes:
    """Encodes `body` as JSON; raises InvalidRequest if that is impossible."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}", code="INVALID_JSON") from error


def _checked(answer: Answer) -> Any:
    if answer.status >= 400:
        raise answer.error()
    return answer.body


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    return Answer(
        response.status,
        _json(await response.read()),
        response.headers.get("X-Request-Id", ""),
        _seconds(response.headers.get("Retry-After")),
    )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each event. Assumes one data line per event, as OpenAI's servers send."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
