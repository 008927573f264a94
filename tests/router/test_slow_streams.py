"""A stream whose first event takes long says that its server lives, so that no client gives up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from pdserve.client.resuming import Progress
from pdserve.common.core.errors import Unavailable
from pdserve.router.http import event_stream

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(event_stream, "COMMENT_AFTER", 0.01)
    async with serve(byte_level_folder(tmp_path)) as made:
        yield made


def held(site: Site) -> asyncio.Event:
    """The generator makes no token until the event is set."""
    gate, say = asyncio.Event(), site.generator._say

    async def wait(*args: Any) -> Any:
        await gate.wait()
        return await say(*args)

    site.generator._say = wait  # type: ignore[method-assign]
    return gate


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_without_an_event_has_comments(site: Site, path: str) -> None:
    gate, body = held(site), BODIES[path] | {"stream": True}
    async with site.session.post(site.url + path, json=body) as response:
        comments = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        gate.set()
        rest = await response.text()
    assert response.status == 200 and comments == [event_stream.COMMENT] * 3
    held_back = rest.replace(event_stream.COMMENT.decode(), "")
    assert held_back.startswith(("data: {", "event: ")) and len(site.generator.requests) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_a_comment_is_an_event(site: Site, path: str) -> None:
    gate, body = held(site), BODIES[path] | {"stream": True}
    site.generator.error = Unavailable("no node came", code="NO_NODE")
    async with site.session.post(site.url + path, json=body) as response:
        await response.content.readuntil(b"\n\n")
        gate.set()
        rest = await response.text()
    assert response.status == 200 and "no node came" in rest
    events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    assert "error" in json.dumps(events[-1])


async def test_an_error_before_a_comment_has_its_status(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "COMMENT_AFTER", 60.0)
    site.generator.error = Unavailable("no node came", code="NO_NODE")
    response = await site.post("/v1/completions", {"prompt": "a", "stream": True})
    assert response.status == 503


async def test_a_client_may_leave_before_the_first_event(site: Site) -> None:
    gate = held(site)
    async with site.session.post(
        site.url + "/v1/completions", json={"prompt": "a", "stream": True}
    ) as response:
        await response.content.readuntil(b"\n\n")
    await asyncio.wait_for(site.generator.closed.wait(), 30)
    assert not gate.is_set() and site.generator.open == 0


def test_resuming_clients_pass_comments_over() -> None:
    progress = Progress({"prompt": "a"}, 30.0)
    lines = [b":", b"", b'data: {"choices": []}', b"", b":", b"", b"id: x", b"", b"data: [DONE]"]
    assert [progress.take(line) for line in lines].count([{"choices": []}]) == 1
    assert progress.done
