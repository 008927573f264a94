"""The aiohttp application: routes, and what happens around every request."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field

from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.http.connection import connection_of
from pdserve.common.obs.logging import request_id_var
from pdserve.common.obs.tracing import PARENT, plain_parent
from pdserve.router.api.app_state import AppState
from pdserve.router.api.compat import MessagesBody, ResponsesBody
from pdserve.router.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadLoRABody,
    TokenizeBody,
    UnloadLoRABody,
)
from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.http import chat, completions, info, messages, openapi, responses
from pdserve.router.http.cors import CORS
from pdserve.router.http.encoding import (
    as_typed,
    code_of,
    error_response,
    http_error_response,
    stopping,
)
from pdserve.router.http.info import ADAPTERS, REGISTRY
from pdserve.router.http.openapi import ROOT_PATH, Handler, Route
from pdserve.router.http.request import BODIES, STATE, Bodies, authorization_of
from pdserve.router.requests.stages import RequestArrival, arrival_var

REQUEST_ID = "X-Request-Id"  # the name under which a client knows its request
_UI = tuple(
    Route(
        "GET", info.path_of(name), info.ui_file, "The cluster as a page", answer=info.type_of(name),
        open=True,
    )
    for name in sorted(info.UI_FILES)
)  # fmt: skip
ROUTES = (
    Route(
        "POST", "/v1/completions", completions.create_completion, "Text goes on", CompletionBody,
        streams=True,
    ),
    Route(
        "POST", "/v1/chat/completions", chat.create_chat_completion, "A conversation goes on",
        ChatBody, streams=True,
    ),
    Route(
        "POST", "/v1/responses", responses.create_response, "OpenAI's Responses, nothing stored",
        ResponsesBody, streams=True,
    ),
    Route(
        "POST", "/v1/messages", messages.create_message, "As Anthropic's clients ask",
        MessagesBody, streams=True,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", messages.count_tokens, "Tokens of such a request",
        MessagesBody,
    ),
    Route("POST", "/tokenize", info.tokenize, "Text or messages to token ids", TokenizeBody),
    Route("POST", "/detokenize", info.detokenize, "Token ids to text", DetokenizeBody),
    Route("GET", "/v1/models", info.list_models, "The model, by each of its names"),
    Route("GET", "/v1/models/{model}", info.get_model, "The model by a name", errors=(404,)),
    Route(
        "GET", "/v1/timelines/{request_id}", info.get_timelines,
        "Where a request is, or where its time went", errors=(404,),
    ),
    Route(
        "GET", "/v1/timelines", info.list_timelines, "A client's last requests, newest first"
    ),
    Route(
        "GET", "/v1/cluster", info.cluster, "Nodes, their load, which pairs fit", operators=True
    ),
    Route(
        "GET", "/v1/cluster/targets", info.targets, "Nodes' metrics, for Prometheus' http_sd",
        operators=True,
    ),
    Route(
        "POST", "/reset_prefix_cache", info.reset_prefix_cache,
        "Prompts computed so far are not found in the caches any more", answer="", operators=True,
    ),
    # What probes, scrapers and load balancers ask. All other paths need the API key, if any.
    Route("GET", "/health", info.health, "This process lives", answer="", open=True),
    Route("GET", "/ping", info.health, "As /health", answer="", open=True),
    Route("POST", "/ping", info.health, "As /health", answer="", open=True),
    Route(
        "GET", "/ready", info.ready, "Whether a request could be served", open=True, errors=(503,)
    ),
    Route("GET", "/load", info.load, "Requests at work or waiting", open=True),
    Route("GET", "/metrics", info.metrics, "For Prometheus", answer="text/plain", open=True),
    Route("GET", "/version", info.server_version, "The release", open=True),
    Route("GET", "/openapi.json", openapi.openapi, "This description", open=True),
    Route("GET", "/docs", openapi.page, "As a page", answer="text/html", open=True),
    *_UI,
)  # fmt: skip
LORA_ROUTES = (
    Route(
        "POST", "/v1/load_lora_adapter", info.load_adapter, "An adapter becomes a model",
        LoadLoRABody, operators=True,
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", info.unload_adapter, "And is none any more",
        UnloadLoRABody, operators=True,
    ),
)  # fmt: skip
_OPEN_PATHS = frozenset(route.path for route in ROUTES if route.open)


@dataclass(slots=True)
class Traffic:
    """The requests being answered, and whether more are."""

    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    draining: bool = False


TRAFFIC = web.AppKey("traffic", Traffic)
ALLOWED = web.AppKey("cors", CORS)


def make_app(
    state: AppState,
    registry: Collector,
    max_body_size: int,
    bodies: Bodies | None = None,
    cors: CORS | None = None,
    root_path: str = "",
    with_ui: bool = True,
    adapters: AdapterSync | None = None,
) -> web.Application:
    """The API over `state`, also under `root_path`. Bodies of more than `max_body_size` bytes
    get 413. With `adapters` clients may load some."""
    app = web.Application(
        client_max_size=max_body_size,
        middlewares=[
            *(_identify, _answer_errors, _check_origin, _track, _preflight, _authenticate)
        ],
    )
    app[STATE] = state
    app[BODIES] = bodies or Bodies(max_body_size)
    app[REGISTRY] = registry
    app[TRAFFIC] = Traffic()
    app[ALLOWED] = cors or CORS()
    routes = tuple(route for route in ROUTES if with_ui or route not in _UI)
    if adapters is not None:
        app[ADAPTERS] = adapters
        routes += LORA_ROUTES
    app[openapi.ROUTES] = routes
    app[ROOT_PATH] = root_path
    for prefix in dict.fromkeys(("", root_path)):
        for route in routes:
            path = prefix + route.path.replace("}", ":.+}")  # names of models have slashes
            add = app.router.add_get if route.method == "GET" else app.router.add_post
            add(path, _for_operators(route.handler) if route.operators else route.handler)
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    await asyncio.sleep(0)  # as in `connection.answering`
    given = request.headers.get(REQUEST_ID, "")
    parent = plain_parent(request.headers.get(PARENT))
    arrival_var.set(RequestArrival(traceparent=parent))
    request_id_var.set(given if is_plain_id(given) else new_request_id("req"))
    return await handler(request)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = http_error_response(error)
        _count(request, PdserveError(response.reason, code=code_of(error)))
        return _in_its_words(request, response)
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
    return _in_its_words(request, error_response(refused))


def _path(request: web.Request) -> str:
    """Without --root-path."""
    return request.path.removeprefix(request.app[ROOT_PATH])


def _in_its_words(request: web.Request, refusal: web.Response) -> web.Response:
    return messages.as_anthropic(refusal) if _is_anthropic(request) else refusal


def _is_anthropic(request: web.Request) -> bool:
    return _path(request).startswith("/v1/messages")


def _count(request: web.Request, error: PdserveError) -> None:
    """A request for tokens that came to nothing, perhaps before it was one."""
    if request.method == hdrs.METH_POST and _path(request).startswith("/v1/"):
        request.app[STATE].metrics.observe_error(error)


@web.middleware
async def _check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[ALLOWED].check(request.method, request.headers)
    return await handler(request)


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
    if request.method != hdrs.METH_OPTIONS:
        return await handler(request)
    error = request.match_info.http_exception
    if isinstance(error, web.HTTPMethodNotAllowed):
        methods = {*error.allowed_methods, hdrs.METH_OPTIONS}
    elif request.path == "*":
        methods = {*(route.method for route in ROUTES), hdrs.METH_HEAD, hdrs.METH_OPTIONS}
    else:
        return await handler(request)
    headers = request.app[ALLOWED].preflight(request.headers, methods)
    return web.Response(status=204, headers={"Allow": ", ".join(sorted(methods)), **headers})


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    if _path(request) not in _OPEN_PATHS:
        request.app[STATE].keys.check(authorization_of(request))
    return await handler(request)


def _for_operators(handler: Handler) -> Handler:
    """The same for those whose key may do this: with the route, so that no spelling of a path
    leads around it."""

    async def checked(request: web.Request) -> web.StreamResponse:
        request.app[STATE].keys.check_operator(authorization_of(request))
        return await handler(request)

    return checked


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams and errors included."""
    response.headers[REQUEST_ID] = request_id_var.get() or "-"
    if _is_anthropic(request):
        response.headers[messages.REQUEST_ID] = response.headers[REQUEST_ID]
    response.headers.update(request.app[ALLOWED].allowed(request.headers))
