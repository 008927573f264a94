"""`LoRARequest`s are brought to a server that starts again meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from pdserve.client import server as server_module
from pdserve.client.server import Server
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import InvalidRequest
from pdserve.offline.lora import LoadedAdapters, LoRARequest

LOAD, UNLOAD, MODELS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"


def refusal(status: int) -> web.Response:
    return web.json_response({"error": {"message": "not now", "code": "no"}}, status=status)


async def test_an_adapter_is_brought_though_the_router_starts_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It did what it was asked once, and its answer was lost."""
    monkeypatch.setattr(server_module, "FIRST_BACKOFF", 0.01)
    card = {"id": "b", "root": "/elsewhere", "parent": "m"}
    models = web.json_response({"data": [card]})
    answers = {
        MODELS: [refusal(503), None, models],
        UNLOAD: [None, refusal(404)],
        LOAD: [None, refusal(503), web.json_response({})],
    }
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json() if request.can_read_body else None))
        if (answer := answers[request.path].pop(0)) is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    adapters = LoadedAdapters(LoRAConfig(enable_lora=True))
    async with TestServer(app) as site, ClientSession() as session:
        server = Server(session, str(site.make_url("/")))
        async with adapters.using(server, [LoRARequest("b", 1, tmp_path)]):
            pass
        assert not any(answers.values())
        load = {"lora_name": "b", "lora_path": str(tmp_path), "load_inplace": True}
        assert asked[-3:] == [(LOAD, load)] * 3
        answers[MODELS] = [web.json_response({"data": []})]
        answers[LOAD] = [refusal(400)]
        with pytest.raises(InvalidRequest, match="not now"):
            async with adapters.using(server, [LoRARequest("c", 1, tmp_path)]):
                raise AssertionError("used")
