"""How many asyncio tasks one client request makes, and what it leaves, in the router as it is:
aiohttp's, the pipeline, gRPC to nodes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from fake_nodes import fake_cluster
from fakes_pipeline import byte_level_folder, served_model
from paths import ROOT
from pdserve.common.obs.logging import request_id_var
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.http.app import make_app
from pdserve.router.http.event_stream import EventStream
from pdserve.router.http.server import HTTPServer
from pdserve.router.requests.admission import Ask
from pdserve.router.requests.generation import GenerationRequest, UpdateQueue
from pdserve.router.requests.request_state import RequestState
from waiting import eventually

ROUTER = str(ROOT / "router") + os.sep


class Tasks:
    """The tasks that the router makes for requests with an id, by the name of their coroutine."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        code = getattr(coro, "cr_code", None)
        ours = code is not None and os.path.realpath(code.co_filename).startswith(ROUTER)
        if ours and request_id_var.get() is not None:
            self.made.append(code.co_name)
        return asyncio.Task(coro, loop=loop, **options)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        await cluster.ask()  # the node's stream is open
        tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
        state = AppState(pipeline=cluster.pipeline, served=served_model(tokenizer))
        app = make_app(state, CollectorRegistry(), 2**20)
        server = await HTTPServer.start(app, "127.0.0.1", 0)
        try:
            yield server.port
        finally:
            asyncio.get_running_loop().set_task_factory(None)
            await server.stop(0)


BODIES: list[tuple[str, dict[str, Any], int]] = [  # path, body, prompts
    ("completions", {"prompt": "hello", "n": 4, "stream": True}, 1),
    ("completions", {"prompt": "hello", "n": 4}, 1),
    ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 1),
    ("completions", {"prompt": list("abcdefgh"), "stream": True}, 8),
]
OF_A_REQUEST = (RequestState, GenerationRequest, UpdateQueue, Ask, EventStream)


@pytest.mark.parametrize(("path", "body", "prompts"), BODIES)
async def test_a_request_makes_few_tasks(
    port: int, path: str, body: dict[str, Any], prompts: int
) -> None:
    """The handler, and one for each prompt, however many choices it has. A second one, if its call
    to the decode node ends before its last token is there, learns why."""
    tasks = Tasks()
    asyncio.get_running_loop().set_task_factory(tasks)
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{port}/v1/{path}"
        async with session.post(url, json={**body, "max_tokens": 6}) as response:
            assert response.status == 200 and "error" not in await response.text()
    assert tasks.made.count("_serve") == prompts
    assert set(tasks.made) <= {"_serve", "_learn"} and len(tasks.made) <= 2 * prompts


async def test_a_request_is_freed_without_garbage_collection(port: int) -> None:
    """A cycle of references would keep each request until the next full collection, which comes
    after 700,000 objects: about 100 MB of ended requests."""
    gc.collect()
    before = _left()  # of other tests of this process
    gc.disable()
    try:
        async with ClientSession() as session:
            for path, body, _ in BODIES:
                url = f"http://127.0.0.1:{port}/v1/{path}"
                async with session.post(url, json={**body, "max_tokens": 6}) as response:
                    assert response.status == 200 and "error" not in await response.text()
        await eventually(lambda: _left() <= before)
    finally:
        gc.enable()


def _left() -> int:
    return sum(type(each) in OF_A_REQUEST for each in gc.get_objects())
