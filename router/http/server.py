"""The HTTP server's life: start → serve → drain → stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from aiohttp import web

from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.request import new_request_id
from pdserve.common.http.connection import Limits
from pdserve.common.http.listener import bind_all
from pdserve.common.http.server import WebServer
from pdserve.common.rpc.renewal import RenewedFiles
from pdserve.common.rpc.tls import load_cert_chain
from pdserve.router.http.app import REQUEST_ID, TRAFFIC
from pdserve.router.http.encoding import as_typed, error_response

logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT = 2.0  # seconds that cancelled requests get to send their error
# Seconds for which a caller of /ready counts as a balancer, which polls again and then goes.
PROBED = 10.0
QUIET = 2.0  # seconds without a request after which balancers have gone
LAME_DUCK = 4.0  # seconds, at most, in which they are waited for
_ASK_TIMEOUT = 1.0  # seconds that new connections get to ask for something


@dataclass(frozen=True, slots=True)
class HTTPServer:
    """The listening application."""

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
        shares_port: bool = False,
    ) -> HTTPServer:
        """Listens; port 0 takes a free port. With `tls` this is HTTPS. `shares_port`: as in
        `bind_http`.

        Raises:
            ConfigError: the address cannot be bound.
        """
        sockets = await bind_http(host, port, shares_port)
        try:
            server = await WebServer.start(app, sockets, limits or Limits(), _refuse, tls)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        return cls(app, server)

    @property
    def port(self) -> int:
        return self.web_server.port

    @property
    def has_balancer(self) -> bool:
        """Whether a balancer polls /ready."""
        return monotonic() - self.app[TRAFFIC].probed < PROBED

    async def stop(self, drain_timeout: float) -> None:
        """Waits until balancers have gone, refuses new requests, waits for those in flight, then
        cancels them; their clients get an error. All within about `drain_timeout` seconds. May be
        called again."""
        traffic, until = self.app[TRAFFIC], monotonic() + drain_timeout
        if not traffic.leaving:
            traffic.leaving = True
            if self.has_balancer:
                traffic.asked = monotonic()
                await self._quiet(min(drain_timeout, LAME_DUCK))
            await self.web_server.listener.finish(min(drain_timeout, _ASK_TIMEOUT))
        traffic.draining = True
        self.web_server.listener.close()
        await _wait(traffic.tasks, max(0.0, until - monotonic()))
        if late := set(traffic.tasks):
            logger.warning("cut off %d requests in flight", len(late))
            for task in late:
                task.cancel()
            await _wait(late, _CANCEL_TIMEOUT)
        await self.web_server.close()

    async def _quiet(self, timeout: float) -> None:
        """Waits until nothing has been asked for `QUIET` seconds, or `timeout` is over."""
        traffic, until = self.app[TRAFFIC], monotonic() + timeout
        while (wait := min(traffic.quiet_in(QUIET), until - monotonic())) > 0:
            await asyncio.sleep(wait)


async def bind_http(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Binds like `bind_all`.

    Raises:
        ConfigError: an address cannot be bound.
    """
    try:
        return await bind_all(host, port, shared)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}")


def _refuse(error: Exception) -> web.Response:
    """Returns the response to bytes that are no HTTP request."""
    response = error_response(as_typed(error))
    response.headers[REQUEST_ID] = new_request_id("req")
    return response


def https_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Returns the TLS context; None without --ssl-certfile.

    Raises:
        ConfigError: the files cannot be read or do not belong together.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, config)
    return context


def https_renewals(config: ServerConfig) -> RenewedFiles:
    """Says when the files of `https_context` have been renewed."""
    paths = (config.ssl_certfile, config.ssl_keyfile)

    def check() -> None:
        https_context(config)

    return RenewedFiles([Path(path) for path in paths if path], check)


def load_pair(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Gives connections from now on the certificate that the files have now."""
    assert config.ssl_certfile is not None
    key = Path(config.ssl_keyfile) if config.ssl_keyfile else None
    load_cert_chain(context, Path(config.ssl_certfile), key, "--ssl-certfile", "--ssl-keyfile")


async def _wait(tasks: Collection[asyncio.Task[object]], timeout: float) -> None:
    if tasks:
        await asyncio.wait(set(tasks), timeout=timeout)
