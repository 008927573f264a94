"""What an orchestrator asks a process: /metrics, /health (it lives), /ready (it can serve)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Readiness = Callable[[], tuple[bool, str]]
"""(can this process produce tokens now, why or why not)"""


def observability_routes(registry: CollectorRegistry, ready: Readiness) -> list[web.RouteDef]:
    """The three routes, for the router's own application as for a node's `MetricsServer`."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
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


async def start_metrics_server(
    host: str, port: int, registry: CollectorRegistry, ready: Readiness
) -> MetricsServer:
    """Serves the three routes; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    app = web.Application()
    app.add_routes(observability_routes(registry, ready))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return MetricsServer(port=runner.addresses[0][1], runner=runner)
