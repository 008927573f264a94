"""Endpoints beside the generations: the model, tokens, the cluster, adapters, and the page."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import pdserve
from pdserve.common.core.errors import InvalidRequest, RequestNotFound, Unavailable
from pdserve.common.core.printable import printable
from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.cluster.adapters import Adapter
from pdserve.router.cluster.served_model import ServedModel
from pdserve.router.http.encoding import error_response, json_response
from pdserve.router.http.openapi import ROOT_PATH, ROUTES
from pdserve.router.http.request import STATE, authorization_of, client_of, preprocess
from pdserve.router.http.together import TOGETHER

DEFAULT_LISTED, MAX_LISTED = 50, 1000  # requests
ANTHROPIC = "anthropic-version"  # a header that all of Anthropic's clients send
ADAPTERS = web.AppKey("adapters", AdapterSync)


async def tokenize(request: web.Request) -> web.Response:
    """Answers like vLLM's /tokenize."""
    (tokens,) = (await preprocess(request, "tokenize")).prompts
    max_model_len = request.app[STATE].model.max_model_len
    return json_response(
        {"tokens": list(tokens), "count": len(tokens), "max_model_len": max_model_len}
    )


async def detokenize(request: web.Request) -> web.Response:
    (text,) = (await preprocess(request, "detokenize")).texts
    return json_response({"prompt": text})


async def list_models(request: web.Request) -> web.Response:
    model, adapters = request.app[STATE].model, request.app[STATE].adapters.served()
    cards = [_card(model, name) for name in model.names]
    cards += [adapter_card(model, each) for each in adapters]
    if ANTHROPIC not in request.headers:
        return json_response({"object": "list", "data": cards})
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return json_response({"data": [_as_anthropic(card) for card in cards], **ends})


async def get_model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["model"]
    state.response_model(name)
    adapter = state.adapters.find(name)
    card = _card(state.model, name) if adapter is None else adapter_card(state.model, adapter)
    return json_response(_as_anthropic(card) if ANTHROPIC in request.headers else card)


def _as_anthropic(card: dict[str, Any]) -> dict[str, Any]:
    """Returns a model in the form of Anthropic's API."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    named = {"id": card["id"], "display_name": card["id"]}
    more = {"max_input_tokens": card["max_model_len"], "lifecycle": "active"}
    return {"type": "model", **named, "created_at": created, **more}


async def get_timelines(request: web.Request) -> web.Response:
    """Finds requests by X-Request-Id or by the answer's id. A client sees its own only."""
    name = request.match_info["request_id"]
    if not (found := await request.app[TOGETHER].timelines(name, _whose(request))):
        raise RequestNotFound(
            f"no request in flight and none of the last ones has the id {printable(name, 128)!r}"
        )
    return json_response({"object": "list", "data": found})


def _whose(request: web.Request) -> str | None:
    """Returns the client to show requests of; None: an operator sees all."""
    is_operator = request.app[STATE].keys.is_operator(authorization_of(request))
    return None if is_operator else client_of(request)


async def list_timelines(request: web.Request) -> web.Response:
    """Lists the last requests, `?limit=` of them; with `?standing=true` those that are served,
    whatever does not move first. A client sees its own only."""
    given = request.query.get("limit", str(DEFAULT_LISTED))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LISTED}", param="limit")
    which = request.query.get("standing", "false")
    if which not in ("true", "false"):
        raise InvalidRequest("standing must be true or false", param="standing")
    together = request.app[TOGETHER]
    found = together.standing if which == "true" else together.last_requests
    data = await found(int(given), _whose(request))
    return json_response({"object": "list", "data": data})


async def health(request: web.Request) -> web.Response:
    """Answers while this process lives; /ready says whether it can serve."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    is_ready, reason = request.app[STATE].pipeline.ready()
    if not is_ready:
        # Not raised: probes ask all the time while a cluster starts, and the log need not have it.
        return error_response(Unavailable(reason, code="NOT_READY"))
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    text = await request.app[TOGETHER].metrics()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def cluster(request: web.Request) -> web.Response:
    return json_response(await request.app[TOGETHER].cluster())


async def history(request: web.Request) -> web.Response:
    """Answers with the samples and events of the last two minutes, or those after `?since=`, in
    seconds since 1970."""
    try:
        since = float(request.query.get("since", "0"))
    except ValueError:
        since = nan
    if not isfinite(since):
        raise InvalidRequest("since must be a number of seconds since 1970", param="since")
    return json_response(await request.app[TOGETHER].history(since))


async def targets(request: web.Request) -> web.Response:
    """Lists the nodes' metrics addresses for Prometheus' HTTP service discovery."""
    nodes = request.app[STATE].pipeline.cluster()["nodes"]
    return json_response(
        [
            {"targets": [node["metrics_address"]], "labels": {"job": f"pdserve-{node['role']}"}}
            for node in nodes
            if node.get("metrics_address")
        ]
    )


async def load(request: web.Request) -> web.Response:
    """Answers like vLLM's /load."""
    return json_response({"server_load": await request.app[TOGETHER].load()})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await request.app[TOGETHER].reset_prefix_cache()
    return web.Response()


async def server_version(request: web.Request) -> web.Response:
    return json_response({"version": pdserve.__version__})


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "pdserve",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


def adapter_card(model: ServedModel, adapter: Adapter) -> dict[str, Any]:
    own = {"created": adapter.created, "root": adapter.path, "parent": model.name}
    return {**_card(model, adapter.name), **own}


# ---- LoRA adapters, as vLLM takes them -------------------------------------------------------


async def load_adapter(request: web.Request) -> web.Response:
    body = (await preprocess(request, "load_lora")).body
    adapter = await request.app[ADAPTERS].load(
        body.lora_name, body.lora_path, bool(body.load_inplace)
    )
    return json_response(adapter_card(request.app[STATE].model, adapter))


async def unload_adapter(request: web.Request) -> web.Response:
    body = (await preprocess(request, "unload_lora")).body
    request.app[ADAPTERS].unload(body.lora_name)
    return json_response({"id": body.lora_name, "object": "model", "deleted": True})


# ---- /ui: a page that shows the cluster at work and talks to it ------------------------------
#
# Every client gets the files; the page asks for an API key where there is one. What nodes and the
# model say is text to it: it runs no code but its own, and asks no other host.

UI_FILES: Final = {
    path.name: path.read_bytes() for path in Path(__file__).with_name("static").iterdir()
}
_UI_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another release has another page
}
_UI_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


async def root(request: web.Request) -> web.Response:
    """Leads a browser to the page, or without one to the API's description; names both to other
    programs."""
    prefix, paths = request.app[ROOT_PATH], {route.path for route in request.app[ROUTES]}
    links = {"api": "/v1", "page": "/ui", "docs": "/docs", "openapi": "/openapi.json"}
    links = {name: prefix + path for name, path in links.items() if name == "api" or path in paths}
    headers = {"Cache-Control": "no-store"}  # the answer depends on Accept
    if "text/html" in request.headers.get("Accept", ""):
        to = links.get("page", links["docs"])
        return web.Response(status=302, headers={**headers, "Location": to})
    server = {"name": "pdserve", "version": pdserve.__version__, **links}
    return json_response(server, headers=headers)


def path_of(name: str) -> str:
    """Returns the path that serves a file; `index.html` is the page itself."""
    return "/ui" if name == "index.html" else f"/ui/{name}"


def type_of(name: str) -> str:
    return _UI_TYPES[Path(name).suffix]


async def ui_file(request: web.Request) -> web.Response:
    last = request.path.rpartition("/")[2]
    name = last if last in UI_FILES else "index.html"
    return web.Response(
        body=UI_FILES[name], content_type=type_of(name), charset="utf-8", headers=_UI_HEADERS
    )
