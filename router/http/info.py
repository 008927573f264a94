"""GET endpoints that tell what this server is: models, health, readiness, cluster, version."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import pdserve
from pdserve.common.core.errors import Unavailable
from pdserve.router.http.encoding import json_response
from pdserve.router.http.errors import error_response
from pdserve.router.http.front import FRONT
from pdserve.router.served_model import ServedModel

# ---- /tokenize and /detokenize, in vLLM's shapes ----


async def tokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    (tokens,) = (await front.prepare(request, "tokenize")).prompts
    return json_response(
        {"tokens": list(tokens), "count": len(tokens), "max_model_len": front.model.max_model_len}
    )


async def detokenize(request: web.Request) -> web.Response:
    (text,) = (await request.app[FRONT].prepare(request, "detokenize")).texts
    return json_response({"prompt": text})


REGISTRY = web.AppKey("registry", CollectorRegistry)


async def list_models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_card(request.app[FRONT].model)]})


async def get_model(request: web.Request) -> web.Response:
    model = request.app[FRONT].model
    model.check_name(request.match_info["model"])
    return json_response(_card(model))


async def health(request: web.Request) -> web.Response:
    """This process lives; whether it can serve is /ready."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    is_ready, reason = request.app[FRONT].pipeline.ready()
    if not is_ready:
        # Asked for all the time while a cluster starts: an answer, not a failure to log.
        return error_response(Unavailable(reason, code="NOT_READY"))
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    text = generate_latest(request.app[REGISTRY])
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def cluster(request: web.Request) -> web.Response:
    return json_response(request.app[FRONT].pipeline.cluster())


async def server_version(request: web.Request) -> web.Response:
    return json_response({"version": pdserve.__version__})


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "pdserve",
        "root": model.root,
        "max_model_len": model.max_model_len,
    }
