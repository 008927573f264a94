"""The HTTP API over a fake generator, and checks of its errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse, ClientSession
from prometheus_client import Counter

from fakes_pipeline import FakeGenerator, served_model
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.http.app import make_app
from pdserve.router.http.server import HTTPServer

if TYPE_CHECKING:
    import openai

WINDOW = 100
CHAT = [{"role": "user", "content": "hello"}]


class Site:
    """A server, its fake generator and a client session."""

    def __init__(self, server: HTTPServer, generator: FakeGenerator, session: ClientSession):
        self.server, self.generator, self.session = server, generator, session
        self.port = server.port
        self.url = f"http://127.0.0.1:{server.port}"
        self.tokenizer = generator.tokenizer

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        response = await self.session.post(self.url + path, data=data, headers=headers)
        await response.read()
        return response

    async def complete(self, **fields: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "a", **fields})
        assert response.status == 200, await response.text()
        return await response.json()

    async def chat(self, **fields: Any) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", {"messages": CHAT, **fields})
        assert response.status == 200, await response.text()
        return await response.json()

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """Returns the events of a stream, and checks their framing."""
        response = await self.post(path, body | {"stream": True}, **headers)
        assert response.status == 200, await response.text()
        frames = (await response.text()).split("\n\n")
        assert frames.pop() == ""
        assert frames.pop() == "data: [DONE]"
        assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def client(self) -> openai.AsyncOpenAI:
        import openai  # takes as long as many tests

        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def serve(
    folder: Path,
    window: int = WINDOW,
    root_path: str = "",
    ui: bool = True,
    limit: int = 64 * 1024,
    **options: Any,
) -> AsyncIterator[Site]:
    """`limit`: most bytes of a body."""
    tokenizer = Tokenizer.from_folder(folder)
    generator = FakeGenerator(tokenizer)
    named = {"names": ("tiny/model", "alias"), "root": str(folder), "created": 1700000000}
    model = served_model(tokenizer, max_model_len=window, **named)
    serving = AppState(pipeline=generator, served=model, **options)  # type: ignore[arg-type]
    registry = serving.metrics.registry
    Counter("pdserve_things", "Things", registry=registry).inc()
    app = make_app(serving, registry, limit, root_path=root_path, with_ui=ui)
    server = await HTTPServer.start(app, "127.0.0.1", 0)
    try:
        async with ClientSession() as session:
            yield Site(server, generator, session)
    finally:
        await server.stop(drain_timeout=0)


async def check_error(
    response: ClientResponse, status: int, param: str | None = None
) -> dict[str, Any]:
    body = await response.json()
    assert response.status == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    assert response.headers["X-Request-Id"]
    return body["error"]


async def check_refused(
    site: Site, path: str, body: dict[str, Any], cases: Sequence[tuple[dict[str, Any], str]]
) -> None:
    """Checks that each of the fields gives a client error before any node is called."""
    for fields, param in cases:
        response = await site.post(path, {**body, **fields})
        error = (await response.json())["error"]
        found = (response.status, error["type"], error["param"])
        assert found == (400, "invalid_request_error", param), (fields, error)
        assert response.headers["X-Request-Id"]
    assert site.generator.requests == []
