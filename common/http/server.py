"""An aiohttp application with limits on connections, and with answers to requests it cannot parse.

aiohttp must not decompress bodies, because it would do so before a handler can refuse the client.
If an answer is sent before the body was read, the rest of the body is neither parsed nor stored. It
is discarded for LINGER seconds: closing a socket with unread bytes resets the connection, and the
client would see the reset instead of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http import HttpProcessingError, RawRequestMessage
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.printable import printable
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.http.connection import Connection, Crowd, Limits
from pdserve.common.http.listener import Listener

READ_AHEAD = 64 * 1024  # bytes; a connection buffers up to twice this of an unread body
LINGER = 5.0  # seconds in which the rest of a refused body is discarded
MAX_MESSAGE = 200  # characters of what is wrong with a request, in the log
_REFUSED = "refused a malformed request: %s"

Refuse = Callable[[Exception], web.Response]
"""Makes the answer to a request that does not parse (`InvalidRequest`) or whose handler failed."""


@dataclass(frozen=True, slots=True)
class WebServer:
    """An application that listens on sockets."""

    runner: web.AppRunner
    listener: Listener
    crowd: Crowd
    watcher: asyncio.Task[None]
    port: int

    @classmethod
    async def start(
        cls,
        app: web.Application,
        sockets: Sequence[socket.socket],
        limits: Limits,
        refuse: Refuse,
        tls: ssl.SSLContext | None = None,
    ) -> WebServer:
        """Listens on `sockets`, which it then owns; with `tls` this is HTTPS. The application
        must use `Connection.answering`, as the middleware `answering` does.

        Raises:
            OSError: another process listens there.
        """
        # A client that hangs up cancels its handler, which closes its generation.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        manager = runner.server
        assert manager is not None, "setup makes it"
        manager.request_factory = _without_expect(manager.request_factory)
        loop = asyncio.get_running_loop()
        crowd = Crowd(limits.max_connections, loop.time)
        log = ServerLog(logging.getLogger(__name__))

        def connection() -> Connection:
            return Connection(_Protocol(manager, loop, refuse, log), limits, crowd)

        listener = Listener(sockets, crowd, connection, tls)
        try:
            listener.start()
        except OSError:
            await runner.cleanup()
            raise
        watcher = asyncio.create_task(crowd.watch(limits.period))
        return cls(runner, listener, crowd, watcher, listener.port)

    async def close(self) -> None:
        """Closes all connections. Calling it again does nothing."""
        self.listener.close()
        await self.runner.cleanup()
        self.watcher.cancel()


class _Protocol(RequestHandler):
    """aiohttp's protocol with two changes: requests that it refuses get an answer in the same form
    as any other error, and it closes the connection after an answer that preceded the body."""

    __slots__ = ("_log", "_refuse", "expected", "waits_to_send")

    def __init__(
        self, manager: web.Server, loop: asyncio.AbstractEventLoop, refuse: Refuse, log: ServerLog
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            logger=log,  # type: ignore[arg-type]  # an adapter of one
            access_log=None,  # type: ignore[arg-type]  # none is written
            auto_decompress=False,
            lingering_time=LINGER,
            read_bufsize=READ_AHEAD,
        )
        self._refuse = refuse
        self._log = log
        self.waits_to_send = False  # whether the client waits for `100 Continue`
        self.expected = ""  # an unknown expectation of the client

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Makes an error's answer. Then the connection closes: later bytes cannot be parsed."""
        if isinstance(exc, HttpProcessingError):
            self._log.malformed(exc)
            what = printable(exc.message.partition("\n")[0].rstrip(":"), MAX_MESSAGE)
            exc = InvalidRequest(f"this is not HTTP: {what}", code="MALFORMED_REQUEST")
        assert isinstance(exc, Exception), message
        response = self._refuse(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent")
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        is_last = self._is_unread(request)
        if is_last:
            resp.force_close()
        done = await super().finish_response(request, resp, start_time)
        if is_last and self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
        return done

    def _is_unread(self, request: web.BaseRequest) -> bool:
        """Returns whether the rest of the body may be too long to discard, so that it must
        close."""
        if request.content.is_eof():
            return False
        size = request.content_length
        return size is None or size > READ_AHEAD or self.waits_to_send


def _without_expect(make: Any) -> Any:
    """Keeps aiohttp from handling `Expect`: before any middleware runs it would ask for the body
    (`100 Continue`) or refuse in plain text. `ask_for_body` and `check_expected` do it later."""

    def made(message: RawRequestMessage, payload: Any, protocol: _Protocol, *args: Any) -> Any:
        expected = message.headers.get(hdrs.EXPECT, "").lower()
        if message.version != HttpVersion11:  # it knows no expectations
            expected = ""
        protocol.waits_to_send = expected == "100-continue"
        protocol.expected = "" if protocol.waits_to_send else expected
        if expected:
            headers = CIMultiDict(message.headers)
            headers.popall(hdrs.EXPECT)
            message = message._replace(headers=CIMultiDictProxy(headers))
        return make(message, payload, protocol, *args)

    return made


async def ask_for_body(request: web.BaseRequest) -> None:
    """Sends `100 Continue` if the client waits for it; call this before reading the body."""
    protocol = request.protocol
    if isinstance(protocol, _Protocol) and protocol.waits_to_send:
        protocol.waits_to_send = False
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # no byte of the answer has been sent


def check_expected(request: web.BaseRequest) -> None:
    """Raises HTTPExpectationFailed if the client sent an unknown expectation."""
    protocol = request.protocol
    if isinstance(protocol, _Protocol) and protocol.expected:
        expected = printable(protocol.expected, MAX_MESSAGE)
        raise web.HTTPExpectationFailed(
            text=f"Expect: {expected} is unknown: send 100-continue, or no Expect"
        )


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Passes aiohttp's log lines on; logs malformed requests once per second at most."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._throttle = LogThrottle(logger)

    def malformed(self, error: HttpProcessingError) -> None:
        self._throttle.info(_REFUSED, printable(error.message, MAX_MESSAGE))

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        error = options.get("exc_info")
        if isinstance(error, web.RequestPayloadError) and error.__cause__ is not None:
            error = error.__cause__  # the body's error, after its answer
        if isinstance(error, HttpProcessingError):
            self.malformed(error)
        else:
            super().exception(msg, *args, **options)
