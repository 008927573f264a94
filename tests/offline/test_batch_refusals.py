"""Which refusals of a server are a line's answer in a batch, and which end the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from pdserve.client.server import Server
from pdserve.common.core.errors import PermissionDenied
from pdserve.offline.batch import answer_all
from pdserve.offline.batch_file import Output

LINES = {"a": "/v1/completions", "b": "/v1/load_lora_adapter", "c": "/v1/completions"}


async def answers_of(folder: Path, refusal: web.Response) -> dict[str, int]:
    """Answers a batch at a server that gives `refusal` to the line of operators; returns the
    status of each line in the output."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({}) if request.path == LINES["a"] else refusal

    app, output = web.Application(), Output(folder / "out.jsonl")
    app.router.add_post("/{path:.*}", handle)
    lines = [{"custom_id": i, "method": "POST", "url": u, "body": {}} for i, u in LINES.items()]
    asked = folder / "in.jsonl"
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    try:
        async with TestServer(app) as site, ClientSession() as session:
            server = Server(session, str(site.make_url("/")))
            await answer_all(server, asked, output, 1, lambda: None)
    finally:
        output.close()
    found: list[Any] = [json.loads(line) for line in output.path.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["status_code"] for line in found}


async def test_a_path_for_operators_is_refused_to_its_line_alone(tmp_path: Path) -> None:
    error = {"message": "this is for operators", "code": "permission_denied"}
    refusal = web.json_response({"error": error}, status=403)
    assert await answers_of(tmp_path, refusal) == {"a": 200, "b": 403, "c": 200}


async def test_a_key_without_rights_ends_the_run(tmp_path: Path) -> None:
    refusal = web.json_response({"error": {"message": "no", "code": "no_country"}}, status=403)
    with pytest.raises(PermissionDenied, match="no"):
        await answers_of(tmp_path, refusal)
