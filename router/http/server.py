"""The HTTP server's life: start → serve → drain → stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.printable import printable
from pdserve.common.core.request import new_request_id
from pdserve.common.rpc.tls import load_cert_chain
from pdserve.router.health import AwakeClock
from pdserve.router.http.app import REQUEST_ID, TRAFFIC
from pdserve.router.http.connection import HEADER_TIMEOUT, Connection, Limits, watch
from pdserve.router.http.encoding import as_typed, error_response, http_error_response
from pdserve.router.http.request import READ_AHEAD, unknown_encoding

logger = logging.getLogger(__name__)

_BACKLOG = 128  # connections the kernel has accepted and this process has not
_REFUSED = "refused a malformed request: %s"
MAX_MESSAGE = 200  # characters of what is wrong with a request, in the log
_CANCEL_TIMEOUT = 2.0  # seconds in which requests cut off by a stop may still say so


@dataclass(frozen=True, slots=True)
class HTTPServer:
    """A listening application."""

    app: web.Application
    runner: web.AppRunner
    listener: asyncio.Server
    connections: set[Connection]
    watcher: asyncio.Task[None]
    port: int

    @classmethod
    async def start(
        cls,
        app: web.Application,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> HTTPServer:
        """Listens; port 0 takes a free one. With `tls` this is HTTPS.

        Raises:
            ConfigError: the address cannot be bound.
        """
        runner = web.AppRunner(
            app,
            # A client that hangs up cancels its handler, which closes its generation.
            handler_cancellation=True,
            access_log=None,
            logger=_ServerLog(logger),
            shutdown_timeout=0.5,
            read_bufsize=READ_AHEAD,
        )
        await runner.setup()
        http = runner.server
        assert http is not None, "setup makes it"
        limits = limits or Limits()
        connections: set[Connection] = set()
        loop = asyncio.get_running_loop()
        # A router that stood still finds requests in its sockets: they are no idle connections.
        now = AwakeClock(2 * limits.period, loop.time)
        try:
            listener = await loop.create_server(
                lambda: Connection(_protocol(http()), limits, now, connections),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=HEADER_TIMEOUT if tls else None,
                backlog=_BACKLOG,
            )
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        watcher = asyncio.create_task(watch(connections, limits))
        return cls(
            app, runner, listener, connections, watcher, listener.sockets[0].getsockname()[1]
        )

    async def stop(self, drain_timeout: float) -> None:
        """Takes no new request, lets those in flight end for `drain_timeout` seconds, then
        cancels them: each client is told. A second stop does no harm."""
        traffic = self.app[TRAFFIC]
        traffic.draining = True
        self.listener.close()
        await _wait(traffic.tasks, drain_timeout)
        if late := set(traffic.tasks):
            logger.warning("cut off %d requests in flight", len(late))
            for task in late:
                task.cancel()
            await _wait(late, _CANCEL_TIMEOUT)
        await self.runner.cleanup()
        self.watcher.cancel()


class _Protocol(RequestHandler):
    """aiohttp's own, but what it refuses by itself is answered as everything else is."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The connection closes behind it: what follows on it cannot be told apart."""
        if isinstance(exc, HttpProcessingError):
            logger.info(_REFUSED, printable(exc.message, MAX_MESSAGE))
            what = printable(exc.message.partition("\n")[0].rstrip(":"), MAX_MESSAGE)
            response = error_response(
                InvalidRequest(f"this is not HTTP: {what}", code="MALFORMED_REQUEST")
            )
            if isinstance(exc, ContentEncodingError):
                response = http_error_response(unknown_encoding())
        else:
            assert isinstance(exc, Exception), message
            response = error_response(as_typed(exc))
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent")
        response.headers[REQUEST_ID] = new_request_id("req")
        response.force_close()
        return response


def _protocol(made: asyncio.Protocol) -> asyncio.Protocol:
    """Its class is nobody's to choose where aiohttp makes it."""
    made.__class__ = _Protocol
    return made


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own words; of a request that does not parse one line is enough."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        error = options.get("exc_info")
        if isinstance(error, web.RequestPayloadError) and error.__cause__ is not None:
            error = error.__cause__  # of a body that has been answered
        if isinstance(error, HttpProcessingError):
            self.info(_REFUSED, printable(error.message, MAX_MESSAGE))
        else:
            super().exception(msg, *args, **options)


def https_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None without --ssl-certfile.

    Raises:
        ConfigError: the files cannot be read or do not belong together.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = Path(config.ssl_keyfile) if config.ssl_keyfile else None
    load_cert_chain(context, Path(config.ssl_certfile), key, "--ssl-certfile", "--ssl-keyfile")
    return context


async def _wait(tasks: Collection[asyncio.Task[object]], timeout: float) -> None:
    if tasks:
        await asyncio.wait(set(tasks), timeout=timeout)
