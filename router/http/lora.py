"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM takes them."""

from __future__ import annotations

from aiohttp import web

from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.http.encoding import json_response
from pdserve.router.http.info import adapter_card
from pdserve.router.http.request import SERVING, preprocess

ADAPTERS = web.AppKey("adapters", AdapterSync)


async def load_adapter(request: web.Request) -> web.Response:
    body = (await preprocess(request, "load_lora")).body
    adapter = await request.app[ADAPTERS].load(
        body.lora_name, body.lora_path, bool(body.load_inplace)
    )
    return json_response(adapter_card(request.app[SERVING].model, adapter))


async def unload_adapter(request: web.Request) -> web.Response:
    body = (await preprocess(request, "unload_lora")).body
    request.app[ADAPTERS].unload(body.lora_name)
    return json_response({"id": body.lora_name, "object": "model", "deleted": True})
