"""The aiohttp application: its routes, and the middlewares around every request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.http.connection import connection_of
from pdserve.common.http.server import check_expected
from pdserve.common.obs.logging import request_id_var
from pdserve.common.obs.tracing import PARENT, plain_parent
from pdserve.router.api.app_state import AppState, stopping
from pdserve.router.api.messages_body import MessagesBody
from pdserve.router.api.responses_body import ResponsesBody
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
from pdserve.router.http.absent import unsupported_endpoint
from pdserve.router.http.cors import CORS, IGNORED_HEADER
from pdserve.router.http.encoding import (
    as_typed,
    code_of,
    error_response,
    http_error_response,
)
from pdserve.router.http.info import ADAPTERS
from pdserve.router.http.instrumentation import HTTP_METRICS, HTTPMetrics, measure
from pdserve.router.http.openapi import ROOT_PATH, Handler, Route
from pdserve.router.http.request import (
    BODIES,
    IGNORED,
    STATE,
    Bodies,
    authorization_of,
    client_of,
)
from pdserve.router.http.response import TURN
from pdserve.router.http.together import TOGETHER, Together
from pdserve.router.requests.generation import Turn
from pdserve.router.requests.stages import SESSION_ID, RequestArrival, arrival_var
from pdserve.router.workers.siblings import Siblings

REQUEST_ID = "X-Request-Id"  # has the id by which a client knows its request
_UI = tuple(
    Route("GET", info.path_of(name), info.ui_file, "A page that shows the cluster",
          answer=info.type_of(name), open=True)
    for name in sorted(info.UI_FILES)
)  # fmt: skip
ROUTES = (
    Route("POST", "/v1/completions", completions.create_completion, "Continues a text",
          CompletionBody, streams=True),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, "Continues a conversation",
          ChatBody, streams=True),
    Route("POST", "/v1/responses", responses.create_response, "OpenAI's Responses, not stored",
          ResponsesBody, streams=True),
    Route("POST", "/v1/messages", messages.create_message, "Anthropic's Messages",
          MessagesBody, streams=True),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens,
          "Counts the tokens of a request to /v1/messages", MessagesBody),
    Route("POST", "/tokenize", info.tokenize, "Turns text or messages into token ids",
          TokenizeBody),
    Route("POST", "/detokenize", info.detokenize, "Turns token ids into text", DetokenizeBody),
    Route("GET", "/v1/models", info.list_models, "Lists the model's names and the adapters"),
    Route("GET", "/v1/models/{model}", info.get_model, "Describes the model of that name",
          errors=(404,)),
    Route("GET", "/v1/timelines/{request_id}", info.get_timelines,
          "Shows where a request is, or where its time went", errors=(404,)),
    Route("GET", "/v1/timelines", info.list_timelines,
          "Lists a client's last requests, newest first"),
    Route("GET", "/v1/cluster", info.cluster, "Shows nodes, their load, and which of them fit",
          operators=True),
    Route("GET", "/v1/cluster/history", info.history,
          "Shows the last two minutes, and the last events of nodes", operators=True),
    Route("GET", "/v1/cluster/targets", info.targets,
          "Lists the nodes' metrics addresses for Prometheus' http_sd", operators=True),
    Route("POST", "/reset_prefix_cache", info.reset_prefix_cache,
          "Makes prefix caches forget every prompt", answer="", operators=True),
    Route("GET", "/", info.root, "Leads a browser to the page, and names this server", open=True),
    # Probes, scrapers and load balancers ask these without a key. Other paths need one, if any.
    Route("GET", "/health", info.health, "Answers while this process lives", answer="", open=True),
    Route("GET", "/ping", info.health, "The same as /health", answer="", open=True),
    Route("POST", "/ping", info.health, "The same as /health", answer="", open=True),
    Route("GET", "/ready", info.ready, "Says whether a request could be served", open=True,
          errors=(503,)),
    Route("GET", "/load", info.load, "Counts requests that run or wait", open=True),
    Route("GET", "/metrics", info.metrics, "Metrics for Prometheus", answer="text/plain",
          open=True),
    Route("GET", "/version", info.server_version, "The release", open=True),
    Route("GET", "/openapi.json", openapi.openapi, "Describes this API", open=True),
    Route("GET", "/docs", openapi.page, "Describes this API as a page", answer="text/html",
          open=True),
    *_UI,
)  # fmt: skip
LORA_ROUTES = (
    Route("POST", "/v1/load_lora_adapter", info.load_adapter, "Loads an adapter as a model",
          LoadLoRABody, operators=True),
    Route("POST", "/v1/unload_lora_adapter", info.unload_adapter, "Unloads an adapter",
          UnloadLoRABody, operators=True),
)  # fmt: skip
_NO_NAME = re.compile(r"[^\w.,:/ \[\]-]", re.ASCII)
_MAX_SHOWN = 32  # names in a header
_OPEN_PATHS = frozenset(route.path for route in ROUTES if route.open)


@dataclass(slots=True)
class Traffic:
    """The requests in flight, and how far the server is with its end."""

    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    leaving: bool = False  # it is not ready any more, and closes each connection behind its answer
    draining: bool = False  # it refuses new requests
    # When something was last asked that clients ask, and whether it is ready (monotonic).
    asked: float = -inf
    probed: float = -inf

    def note(self, path: str) -> None:
        """Notes a request's time."""
        if path == "/ready":
            self.probed = monotonic()
        elif path not in _OPEN_PATHS:
            self.asked = monotonic()

    def quiet_in(self, seconds: float) -> float:
        """Returns the seconds for which it must still be quiet, as far as is known."""
        return self.asked + seconds - monotonic()


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
    siblings: Siblings | None = None,
) -> web.Application:
    """Builds the API over `state`, also under `root_path`. Bodies of more than `max_body_size`
    bytes get 413. With `adapters` clients may load adapters. `siblings`: other workers behind the
    same port."""
    app = web.Application(
        client_max_size=max_body_size,
        middlewares=[
            *(measure, _identify, _answer_errors, _check_origin, _track, _preflight),
            _authenticate,
        ],
    )
    app[STATE] = state
    app[BODIES] = bodies or Bodies(max_body_size)
    app[TOGETHER] = Together(state, registry, siblings)
    app[HTTP_METRICS] = HTTPMetrics(state.metrics.registry)
    app[TRAFFIC] = Traffic()
    app[TURN] = Turn()
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
            handler = _for_operators(route.handler) if route.operators else route.handler
            for each in {path, path.rstrip("/") or path}:  # the root path with or without a slash
                add(each, handler)
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    await asyncio.sleep(0)  # other requests get their turn, as in `connection.answering`
    given = request.headers.get(REQUEST_ID, "")
    parent = plain_parent(request.headers.get(PARENT))
    session = request.headers.get(SESSION_ID, "")
    arrival_var.set(RequestArrival(traceparent=parent, session=session))
    request_id_var.set(given if is_plain_id(given) else new_request_id("req"))
    return await handler(request)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    refused: PdserveError
    try:
        check_expected(request)
        return await handler(request)
    except web.HTTPException as error:
        absent = unsupported_endpoint(_path(request)) if error.status == 404 else None
        response = http_error_response(error) if absent is None else error_response(absent)
        refused = absent or PdserveError(response.reason, code=code_of(error))
        _count(request, refused, response.status)
        return _in_api_format(request, response)
    except web.RequestPayloadError as error:  # broken chunks or compression
        refused = InvalidRequest(f"the body cannot be read: {error}")
    except ConnectionError:  # the client is gone and will not read this
        return web.Response(status=499)
    except asyncio.CancelledError:
        if request.transport is None or request.transport.is_closing():
            raise
        refused = stopping()  # the client is there: this server stops
    except Exception as error:
        refused = as_typed(error)
    # Else a circle: their frames know the error, and all of the request.
    refused.__traceback__ = refused.__context__ = refused.__cause__ = None
    _count(request, refused)
    await request.app[STATE].brake(refused, client_of(request))
    return _in_api_format(request, error_response(refused))


def _path(request: web.Request) -> str:
    """Returns the path without --root-path."""
    return request.path.removeprefix(request.app[ROOT_PATH]) or "/"


def _in_api_format(request: web.Request, refusal: web.Response) -> web.Response:
    return messages.as_anthropic(refusal) if _is_anthropic(request) else refusal


def _is_anthropic(request: web.Request) -> bool:
    path = _path(request)
    is_models = path.startswith("/v1/models") and info.ANTHROPIC in request.headers
    return is_models or path.startswith("/v1/messages")


def _count(request: web.Request, error: PdserveError, status: int | None = None) -> None:
    """Counts a POST that failed, perhaps before its body was read."""
    if request.method == hdrs.METH_POST and _path(request).startswith("/v1/"):
        request.app[STATE].refused(error, client_of(request), status)


@web.middleware
async def _check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[ALLOWED].check(request.method, request.headers)
    return await handler(request)


@web.middleware
async def _track(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keeps track of the requests in flight: a stop waits for them, then cancels them."""
    traffic = request.app[TRAFFIC]
    if traffic.draining:
        raise stopping()
    traffic.note(_path(request))
    if traffic.leaving and _path(request) == "/ready":
        return error_response(stopping())  # not raised, as those of `info.ready`
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
    """Answers a browser's preflight, which comes before JSON to another origin."""
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
    """Wraps a handler with the check for an operator's key. The route has it, so that no spelling
    of a path can evade it."""

    async def checked(request: web.Request) -> web.StreamResponse:
        request.app[STATE].keys.check_operator(authorization_of(request))
        return await handler(request)

    return checked


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds headers to every response, streams and errors included."""
    response.headers[REQUEST_ID] = request_id_var.get() or "-"
    if _is_anthropic(request):
        response.headers[messages.REQUEST_ID] = response.headers[REQUEST_ID]
    if ignored := request.get(IGNORED):
        response.headers[IGNORED_HEADER] = _as_header(ignored)
    response.headers.update(request.app[ALLOWED].allowed(request.headers))
    if request.app[TRAFFIC].leaving:
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def _as_header(names: Sequence[str]) -> str:
    """Joins names that clients may have chosen; other characters than those of paths become `?`."""
    return _NO_NAME.sub("?", ", ".join(names[:_MAX_SHOWN]))
