"""`/openapi.json` and `/docs`: the API's description, made from the bodies' schemas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import pdserve
from pdserve.router.http.encoding import json_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ERRORS = {
    400: "a value is wrong; `param` names it",
    401: "the API key is missing or wrong",
    403: "only operators may do this (`--admin-api-key`)",
    404: "there is no such model, request or path",
    408: "the body comes too slowly",
    409: "the first request of this Idempotency-Key waits itself",
    410: "the nodes of the model version that began the stream are gone",
    413: "the body is too large",
    415: "the body is not JSON, or its encoding is unknown",
    422: "another request has this Idempotency-Key",
    429: "too many requests wait; see `Retry-After`",
    500: "a node failed, or the server has a defect",
    503: "no node can serve, or the server stops; see `Retry-After`",
    504: "the request made no progress within --request-timeout",
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>pdserve {version}</title>
<style>
body {{ font: 16px/1.5 system-ui; max-width: 60rem; margin: 2rem auto; color-scheme: light dark }}
td {{ vertical-align: top; padding: .1rem .8rem .1rem 0 }}
summary {{ cursor: pointer; padding: .3rem 0 }}
</style>
<h1>pdserve {version}</h1><p>Programs read <a href="openapi.json">openapi.json</a>.</p>
{operations}</html>"""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str  # {name} is a variable
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    answer: str = "application/json"  # content type
    streams: bool = False  # answers with server-sent events if the body asks for them
    open: bool = False  # needs no API key
    operators: bool = False  # needs an operator's key, as `APIKeys.check_operator` says
    errors: Sequence[int] = ()  # statuses beside those of every body


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


ROUTES = web.AppKey("routes", tuple[Route, ...])
ROOT_PATH = web.AppKey("root_path", str)


async def openapi(request: web.Request) -> web.Response:
    return json_response(document(request.app[ROUTES], request.app[ROOT_PATH]))


async def page(request: web.Request) -> web.Response:
    text = _page(document(request.app[ROUTES], request.app[ROOT_PATH]))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    headers = {"Content-Security-Policy": policy}
    return web.Response(text=text, content_type="text/html", headers=headers)


@cache
def document(routes: tuple[Route, ...], root_path: str = "") -> dict[str, Any]:
    """Returns the description in OpenAPI 3.1."""
    bodies = sorted({route.body for route in routes if route.body}, key=lambda body: body.__name__)
    _, schemas = models_json_schema(
        [*((body, "validation") for body in bodies), (Error, "serialization")],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": pdserve.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    statuses = {*route.errors, *([] if route.open else [401]), *([403] * route.operators)}
    if route.body is not None:
        statuses |= {400, 404, 408, 409, 410, 413, 415, 422, 429, 500, 503, 504}
    content: dict[str, Any] = {route.answer: {}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{route.handler.__name__}",
        "responses": {"200": {"description": "done", "content": content if route.answer else {}}},
    }
    for status in sorted(statuses):
        schema = {"schema": {"$ref": "#/components/schemas/Error"}}
        operation["responses"][str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": schema},
        }
    if route.body is not None:
        schema = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": schema}}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if not route.open:
        operation["security"] = [{"key": []}, {}]  # a key if the server has any
    return operation


# ---- /docs -----------------------------------------------------------------------------------


def _page(spec: dict[str, Any]) -> str:
    operations = [
        _section(method.upper(), path, operation, spec["components"]["schemas"])
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
    ]
    return _PAGE.format(version=escape(spec["info"]["version"]), operations="\n".join(operations))


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    head = f"<summary><code>{method} {escape(path)}</code> {escape(operation['summary'])}</summary>"
    rows = []
    if body := operation.get("requestBody"):
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        for field, schema in schemas[name]["properties"].items():
            must = " (required)" if field in required else ""
            rows.append((f"<code>{field}</code>{must}", escape(schema.get("description", ""))))
    for status, response in operation["responses"].items():
        rows.append((f"→ {status}", escape(response["description"])))
    cells = "".join(f"<tr><td>{left}</td><td>{right}</td></tr>" for left, right in rows)
    return f"<details>{head}<table>{cells}</table></details>"
