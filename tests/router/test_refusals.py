"""Refused work costs little: it is refused before anything is made of it, and later and later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from pdserve.common.core.errors import Overloaded
from pdserve.router.api import app_state, preprocess
from pdserve.router.requests.admission import Admission, Ask
from pdserve.router.requests.brake import BURST, LONGEST, MAX_CLIENTS, RATE, RefusalBrake
from pdserve.router.requests.queue_bounds import Batch

BODIES = {
    "/v1/completions": {"prompt": [[5]] * 1000},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(byte_level_folder(tmp_path)) as made:
        yield made


def full(*_: Any, **__: Any) -> None:
    raise Overloaded("8 requests of this client are waiting already", retry_after=1.0)


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_without_room_is_refused_before_it_is_parsed(
    site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each body of 1,000 prompts took a tenth of a second of the router's event loop."""
    monkeypatch.setattr(site.generator, "check_room", full)
    monkeypatch.setattr(
        preprocess.Preprocessor, "preprocess", lambda *_: pytest.fail("it is parsed")
    )
    answer = await site.post(path, BODIES[path])
    assert answer.status == 429 and answer.headers["Retry-After"]
    assert site.generator.requests == []


async def test_prompts_without_room_for_their_tokens_become_no_requests(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def check(client: str, tokens: int = 1) -> None:
        told.append(tokens)
        if tokens > 1:
            full()

    monkeypatch.setattr(site.generator, "check_room", check)
    monkeypatch.setattr(app_state.AppState, "make_request", lambda *_, **__: pytest.fail("made"))
    answer = await site.post("/v1/completions", {"prompt": [[5, 6, 7]] * 50})
    assert answer.status == 429 and told == [1, 150]


async def test_the_prompts_of_a_body_are_checked_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], app_state.make_sampling
    monkeypatch.setattr(app_state, "make_sampling", lambda *a: made.append(0) or real(*a))
    body = {"prompt": [[5], [6, 7], [8]] * 20, "max_tokens": 3}
    for seed in (None, 7):
        made.clear()
        answer = await site.post("/v1/completions", body | {"seed": seed})
        assert answer.status == 200 and len(made) == 1
        requests = site.generator.requests[-60:]
        assert sorted(tuple(each.prompt_token_ids) for each in requests) == sorted(
            map(tuple, body["prompt"])
        )
        assert len({each.request_id for each in requests}) == 60
        assert len({each.sampling.seed for each in requests}) == (1 if seed else 60)


async def test_refusals_are_one_line_a_second(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(site.generator, "check_room", full)
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            assert (await site.post("/v1/completions", BODIES["/v1/completions"])).status == 429
    said = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(said) < 20 and "a client is refused: 8 requests of this client" in said[0]


# ---- what the queue says ----


async def test_room_is_what_admission_would_give() -> None:
    """No body is refused early that would have been admitted."""
    admission = Admission(max_running=2, max_waiting=4, timeout=60.0, max_client_share=0.5)
    async with AsyncExitStack() as stack:

        async def enter(client: str) -> None:
            ask = Ask(amount=1, tokens=1, batch=Batch(client, 1), prompt_tokens=1)
            ask.tell = lambda error: None
            admission.enter(ask)
            stack.callback(admission.leave, ask)

        for client in ("a", "b", "a", "a"):
            admission.check_room(client)
            await enter(client)
        for _ in range(2):
            with pytest.raises(Overloaded, match="2 requests of this client"):
                admission.check_room("a")
            with pytest.raises(Overloaded, match="2 requests of this client"):
                await enter("a")
        for client in ("b", "c"):
            admission.check_room(client)
            await enter(client)
        for again in (admission.check_room, enter):
            with pytest.raises(Overloaded, match="4 requests are waiting"):
                if (entering := again("b")) is not None:
                    await entering
    admission.check_room("a")
    assert admission.waiting == admission.running == 0


# ---- later and later ----


def test_a_client_that_causes_many_refusals_waits_longer_and_longer() -> None:
    now = [100.0]
    brake = RefusalBrake(lambda: now[0])
    assert [brake.delay("a") for _ in range(int(BURST))] == [0.0] * int(BURST)
    delays = [brake.delay("a") for _ in range(2000)]
    assert delays == sorted(delays) and delays[0] == pytest.approx(1 / RATE)
    assert delays[-1] == LONGEST
    assert brake.delay("b") == 0.0, "others do not wait"
    now[0] += LONGEST + BURST / RATE
    assert brake.delay("a") == 0.0
    for number in range(2 * MAX_CLIENTS):
        brake.delay(str(number))
    assert len(brake._due) == MAX_CLIENTS


async def test_a_flood_of_refused_bodies_is_slowed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.generator, "check_room", full)
    asked: list[float] = []
    slept = asyncio.Event()

    async def sleep(seconds: float, real: Any = asyncio.sleep) -> None:
        if seconds > 0.01:
            asked.append(seconds)
            slept.set()
        await real(0)

    monkeypatch.setattr(app_state.asyncio, "sleep", sleep)
    for _ in range(int(BURST) + 20):
        await site.post("/v1/completions", {"prompt": "a"})
    assert slept.is_set() and max(asked) > 5 / RATE
