"""`pdserve doctor --cluster` reads a stream: the token that came first decides, at any speed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pdserve.cli.doctor_stream import ASKED, HELD, TOKENS, stream
from pdserve.common.core.errors import DeadlineExceeded, ModelNotFound

RUNNING: dict[str, Any] = {"status": "running", "timeline": {"first_token": 1.0, "finished": None}}
AGES = 1000.0  # seconds: longer than a test


def finished(seconds: float) -> dict[str, Any]:
    return {"status": "finished", "timeline": {"first_token": 1.0, "finished": 1.0 + seconds}}


class Router:
    """Says of each stream, once its first event is there, what comes next of `told`."""

    def __init__(self, *told: dict[str, Any] | Exception, stands: float = 0.0) -> None:
        self.told: Iterator[dict[str, Any] | Exception] = iter(told)
        self.stands, self.asked = stands, list[int]()

    async def model(self) -> str:
        return "model"

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append(body["max_tokens"])
        time.sleep(self.stands)  # noqa: ASYNC251 - the whole process stands still
        yield {"id": "cmpl-1"}
        raise AssertionError("one event is enough")

    async def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/timelines/cmpl-1"
        told = next(self.told)
        if isinstance(told, Exception):
            raise told
        return {"data": [told]}


async def said(router: Any) -> str:
    found = await stream(router, 1000)
    return f"{found.verdict}: {found.seen}"


async def test_an_event_of_a_stream_that_goes_on_was_not_held_back() -> None:
    assert (await said(router := Router(RUNNING))).startswith("ok: ")
    assert len(router.asked) == 1


async def test_streams_that_were_over_before_their_first_event_came_were_held_back() -> None:
    router = Router(*[finished(AGES)] * HELD)
    assert (await said(router)).endswith(": a proxy holds them back")
    assert router.asked == [256, 500, 500]


async def test_one_that_goes_on_says_more_than_others_that_were_over() -> None:
    assert (await said(Router(*[finished(AGES)] * (HELD - 1), RUNNING))).startswith("ok: ")


async def test_a_process_that_stood_still_accuses_no_proxy() -> None:
    router = Router(*[finished(0.03)] * len(TOKENS), stands=0.02)
    assert (await said(router)).startswith("warning: ")


async def test_another_router_that_does_not_know_the_stream_accuses_no_proxy() -> None:
    router = Router(*[ModelNotFound("HTTP 404: ")] * ASKED)
    assert (await said(router)).startswith("warning: no router knows the stream")


async def test_of_two_routers_behind_one_address_the_one_that_streams_is_found() -> None:
    assert (await said(Router(ModelNotFound("HTTP 404: "), RUNNING))).startswith("ok: ")


async def test_no_event_in_time_is_told() -> None:
    class Mute(Router):
        async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
            raise DeadlineExceeded("no answer")
            yield {}

    assert (await said(Mute())).startswith("failed: no event came in time")
