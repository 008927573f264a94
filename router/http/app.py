"""The aiohttp application: routes, and what happens around every request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.obs.logging import request_id_var
from pdserve.router.auth import HEADER as AUTHORIZATION
from pdserve.router.http import chat, completions, info
from pdserve.router.http.connection import connection_of
from pdserve.router.http.encoding import (
    as_typed,
    code_of,
    error_response,
    http_error_response,
    stopping,
)
from pdserve.router.http.info import REGISTRY
from pdserve.router.http.request import BODIES, SERVING, Bodies
from pdserve.router.http.response import TIMELINE_HEADER
from pdserve.router.serving import Serving

REQUEST_ID = "X-Request-Id"  # the name under which a client knows its request


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CORS_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
    "Access-Control-Allow-Headers": f"Authorization, Content-Type, {REQUEST_ID}, {TIMELINE_HEADER}",
    "Access-Control-Max-Age": "86400",
}


# What probes, scrapers and load balancers ask; all other paths need the API key, if there is one.
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})


@dataclass(slots=True)
class Traffic:
    """The requests being answered, and whether more are."""

    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    draining: bool = False


TRAFFIC = web.AppKey("traffic", Traffic)


def make_app(
    serving: Serving,
    registry: Collector,
    max_body_size: int,
    bodies: Bodies | None = None,
) -> web.Application:
    """The API over `serving`. Bodies of more than `max_body_size` bytes get 413."""
    app = web.Application(
        client_max_size=max_body_size,
        middlewares=[_identify, _answer_errors, _track, _preflight, _authenticate],
    )
    app[SERVING] = serving
    app[BODIES] = bodies or Bodies(max_body_size)
    app[REGISTRY] = registry
    app[TRAFFIC] = Traffic()
    app.add_routes(
        [
            web.post("/v1/completions", completions.create_completion),
            web.post("/v1/chat/completions", chat.create_chat_completion),
            web.post("/tokenize", info.tokenize),
            web.post("/detokenize", info.detokenize),
            web.get("/v1/models", info.list_models),
            web.get("/v1/models/{model:.+}", info.get_model),
            web.get("/v1/cluster", info.cluster),
            web.get("/health", info.health),
            web.get("/ready", info.ready),
            web.get("/metrics", info.metrics),
            web.get("/version", info.server_version),
        ]
    )
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID, "")
    request_id_var.set(given if is_plain_id(given) else new_request_id("req"))
    return await handler(request)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = http_error_response(error)
        _count(request, PdserveError(response.reason, code=code_of(error)))
        return response
    except web.RequestPayloadError as error:  # broken chunks or compression
        refused: PdserveError = InvalidRequest(f"the body cannot be read: {error}")
    except ConnectionError:  # the client is gone: nobody reads this, and nobody logs it
        return web.Response(status=499)
    except asyncio.CancelledError:
        if request.transport is None or request.transport.is_closing():
            raise
        refused = stopping()  # the client is there, so it is this server that stops
    except Exception as error:
        refused = as_typed(error)
    _count(request, refused)
    return error_response(refused)


def _count(request: web.Request, error: PdserveError) -> None:
    """A request for tokens that came to nothing, perhaps before it was one."""
    if request.method == hdrs.METH_POST and request.path.startswith("/v1/"):
        request.app[SERVING].metrics.observe_error(error)


@web.middleware
async def _track(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Knows the requests in flight, so that a stop can wait for them, then end them."""
    traffic = request.app[TRAFFIC]
    if traffic.draining:
        raise stopping()
    task = asyncio.current_task()
    assert task is not None
    traffic.tasks.add(task)
    connection = connection_of(request)
    try:
        with nullcontext() if connection is None else connection.answering():
            return await handler(request)
    finally:
        traffic.tasks.discard(task)


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Browsers ask before they POST JSON to another origin."""
    if request.method == hdrs.METH_OPTIONS:
        return web.Response(status=204, headers=_CORS_PREFLIGHT)
    return await handler(request)


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path not in _OPEN_PATHS:
        request.app[SERVING].keys.check(request.headers.get(AUTHORIZATION))
    return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams and errors included."""
    response.headers[REQUEST_ID] = request_id_var.get() or "-"
    response.headers["Access-Control-Allow-Origin"] = "*"
    response.headers["Access-Control-Expose-Headers"] = REQUEST_ID
