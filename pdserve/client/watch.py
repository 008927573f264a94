"""Notices soon that a router stands still or has vanished, while a client waits for its answer.

An answer may be silent for minutes, as a long prompt waits in the queue. So silence is a reason to
ask the router for its health; without an answer to that it counts as dead:

    connect ≤ CONNECT s · silent for QUIET s ─▶ GET /health ─▶ nothing within PROBE s ─▶ dead
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR, socket
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener

import aiohttp

CONNECT = 3.0  # seconds for a connection
QUIET = 3.0  # seconds without a byte, after which the router is asked for its health
PROBE = 3.0  # seconds that it has to answer

T = TypeVar("T")


class Watch:
    """Watches the router of one request for a thread. Use it as a context manager; when the router
    is dead, the connection ends, so that reading from it fails."""

    def __init__(self, url: str) -> None:
        """`url`: of the router, without a path."""
        self._url = url
        self._sockets: list[socket] = []
        self._heard = monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pdserve-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._done.set()

    def heard(self) -> None:
        """Notes that something came."""
        self._heard = monotonic()

    def open(self, request: Request, timeout: float) -> HTTPResponse:
        """Opens a request; `timeout`: seconds of silence that are allowed in any case.

        Raises:
            HTTPError: the router refuses it. OSError, HTTPException: it is gone.
        """
        response: HTTPResponse = _opener(self._sockets.append).open(request, timeout=timeout)
        return response

    def _watch(self) -> None:
        while not self._done.wait(max(0.05, self._heard + QUIET - monotonic())):
            if monotonic() - self._heard < QUIET:
                continue
            if not is_alive(self._url) and not self._done.is_set():
                for each in self._sockets:
                    with suppress(OSError):
                        socket.shutdown(each, SHUT_RDWR)
                return
            self.heard()


def is_alive(url: str) -> bool:
    """Returns whether the router answers at all."""
    try:
        with _opener(lambda _: None).open(Request(url + "/health"), timeout=PROBE):
            return True
    except HTTPError as error:
        error.close()
        return True
    except (OSError, HTTPException):
        return False


class _Connection(HTTPConnection):
    """Bounds the time to connect apart from that to read, and hands out its socket."""

    def __init__(self, opened: Callable[[socket], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._opened = opened

    def connect(self) -> None:
        silence = self.timeout
        self.timeout = CONNECT
        super().connect()
        self.sock.settimeout(silence)
        self._opened(self.sock)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Handler(HTTPHandler, HTTPSHandler):
    def __init__(self, opened: Callable[[socket], None]) -> None:
        super().__init__()
        self._opened = opened

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_Connection, self._opened), req)  # type: ignore[arg-type]

    def https_open(self, req: Request) -> HTTPResponse:
        context = ssl.create_default_context()
        made = partial(_SecureConnection, self._opened)
        return self.do_open(made, req, context=context)  # type: ignore[arg-type]


def _opener(opened: Callable[[socket], None]) -> Any:
    return build_opener(_Handler(opened))


async def watched(work: Awaitable[T], session: aiohttp.ClientSession, url: str) -> T:
    """Awaits `work` while the router answers, for an event loop.

    Raises:
        ConnectionError: the router is dead; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=QUIET))[0]:
            if not await _is_alive(session, url):
                raise ConnectionError(f"{url} does not answer")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    limit = aiohttp.ClientTimeout(total=PROBE)
    with suppress(aiohttp.ClientError, OSError):
        async with session.get(url + "/health", timeout=limit):
            return True
    return False
