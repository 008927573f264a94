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

from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable
from pdserve.common.rpc.tls import load_cert_chain
from pdserve.router.health import AwakeClock
from pdserve.router.http.app import TRAFFIC
from pdserve.router.http.connection import HEADER_TIMEOUT, Connection, Limits, watch

logger = logging.getLogger(__name__)

_BACKLOG = 128  # connections the kernel has accepted and this process has not
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
                lambda: Connection(http(), limits, now, connections),
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


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own words; of a request that does not parse one line is enough."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        error = options.get("exc_info")
        if isinstance(error, HttpProcessingError):
            self.info("refused a malformed request: %s", printable(error.message, MAX_MESSAGE))
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
