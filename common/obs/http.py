"""The routes for orchestrators: /metrics, /health (the process lives), /ready (it can serve)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.host import bind, cannot_listen
from pdserve.common.http.connection import Limits, answering
from pdserve.common.http.server import WebServer
from pdserve.common.obs.exposition import exposed

logger = logging.getLogger(__name__)

_PURPOSE = ("metrics", "--metrics-port")
# Scrapers and probes need few connections; the other files are for the node's work.
_LIMITS = Limits(timeout_keep_alive=75.0, write_timeout=30.0, max_connections=128)

Readiness = Callable[[], tuple[bool, str]]
"""Returns (whether this process can produce tokens now, the reason)."""


def observability_routes(registry: Collector, ready: Readiness) -> list[web.RouteDef]:
    """Returns the three routes."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=exposed(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def readiness(request: web.Request) -> web.Response:
        can_serve, reason = ready()
        return web.json_response(
            {"ready": can_serve, "reason": reason}, status=200 if can_serve else 503
        )

    return [
        web.get("/metrics", metrics),
        web.get("/health", health),
        web.get("/ready", readiness),
    ]


def bind_metrics(host: str, port: int) -> socket.socket:
    """Binds the port (0: a free one); it answers only after `start_metrics_server`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    return bind(host, port, *_PURPOSE)


async def start_metrics_server(
    bound: socket.socket, registry: Collector, ready: Readiness
) -> WebServer:
    """Serves the three routes on the socket of `bind_metrics`, which the server then owns.

    Raises:
        ConfigError: another process listens there by now.
    """
    host, port = bound.getsockname()[:2]
    app = web.Application(middlewares=[answering])
    app.add_routes(observability_routes(registry, ready))
    try:
        return await WebServer.start(app, [bound], _LIMITS, _refuse)
    except OSError as error:
        raise cannot_listen(host, port, *_PURPOSE, error) from error


def _refuse(error: Exception) -> web.Response:
    if isinstance(error, PdserveError):
        return web.Response(status=error.http_status, text=error.message)
    logger.error("unexpected error", exc_info=error)
    return web.Response(status=500, text="internal error")
