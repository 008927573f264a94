"""What an orchestrator asks a process: /metrics, /health (it lives), /ready (it can serve)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from pdserve.common.core.host import bind, cannot_listen
from pdserve.common.obs.exposition import exposed

_PURPOSE = ("metrics", "--metrics-port")

Readiness = Callable[[], tuple[bool, str]]
"""(can this process produce tokens now, why or why not)"""


def observability_routes(registry: Collector, ready: Readiness) -> list[web.RouteDef]:
    """The three routes, for the router's own application as for a node's `MetricsServer`."""

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


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A node's HTTP server; whoever started it closes it."""

    port: int
    runner: web.AppRunner

    async def close(self) -> None:
        await self.runner.cleanup()


def bind_metrics(host: str, port: int) -> socket.socket:
    """Takes the port (0: a free one); nothing is answered before `start_metrics_server`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    return bind(host, port, *_PURPOSE)


async def start_metrics_server(
    bound: socket.socket, registry: Collector, ready: Readiness
) -> MetricsServer:
    """Serves the three routes on what `bind_metrics` took, which becomes the server's.

    Raises:
        ConfigError: another process listens there by now.
    """
    host, port = bound.getsockname()[:2]
    app = web.Application()
    app.add_routes(observability_routes(registry, ready))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
    except OSError as error:
        bound.close()
        await runner.cleanup()
        raise cannot_listen(host, port, *_PURPOSE, error) from error
    return MetricsServer(port=port, runner=runner)
