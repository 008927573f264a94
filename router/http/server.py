"""The HTTP server's life: start → serve → drain → stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.request import new_request_id
from pdserve.common.http.connection import Limits
from pdserve.common.http.listener import bind_all
from pdserve.common.http.server import WebServer
from pdserve.common.rpc.tls import load_cert_chain
from pdserve.router.http.app import REQUEST_ID, TRAFFIC
from pdserve.router.http.encoding import as_typed, error_response

logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT = 2.0  # seconds in which requests cut off by a stop may still say so


@dataclass(frozen=True, slots=True)
class HTTPServer:
    """The router's application, listening."""

    app: web.Application
    web_server: WebServer

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
        try:
            sockets = await bind_all(host, port)
            server = await WebServer.start(app, sockets, limits or Limits(), _refuse, tls)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return cls(app, server)

    @property
    def port(self) -> int:
        return self.web_server.port

    async def stop(self, drain_timeout: float) -> None:
        """Takes no new request, lets those in flight end for `drain_timeout` seconds, then
        cancels them: each client is told. A second stop does no harm."""
        traffic = self.app[TRAFFIC]
        traffic.draining = True
        self.web_server.listener.close()
        await _wait(traffic.tasks, drain_timeout)
        if late := set(traffic.tasks):
            logger.warning("cut off %d requests in flight", len(late))
            for task in late:
                task.cancel()
            await _wait(late, _CANCEL_TIMEOUT)
        await self.web_server.close()


def _refuse(error: Exception) -> web.Response:
    """The answer to what never was a request."""
    response = error_response(as_typed(error))
    response.headers[REQUEST_ID] = new_request_id("req")
    return response


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
