"""How a client's updates come to it: through its outlet, or by its task."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Outlet,
    Put,
    TextDelta,
    Turn,
    Updates,
    generate,
)

TEXT = "abcdefghijkl"
REQUEST = GenerationRequest("r", (1,), SamplingParams())


async def spell(request: GenerationRequest, put: Put) -> GenerationStats:
    """Three letters in each step."""
    for at in range(0, len(TEXT), 3):
        for _ in range(50):  # turns of the loop, in which the reader has read
            await asyncio.sleep(0)
        for letter in TEXT[at : at + 3]:
            put(TextDelta(0, letter, (SampledToken(1),)))
    put(TextDelta(0, ".", (), FinishReason.STOP))
    return GenerationStats(1, 13, 0, Timeline())


def letters(updates: Updates) -> str:
    return "".join(each.text for _, each in updates if isinstance(each, TextDelta))


class Client:
    """Keeps what it got, by whom: `written` in each step, `taken` by its task."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses  # the letters with which a step begins
        self.outlet = Outlet(Turn())
        self.written: list[str] = []
        self.taken: list[str] = []
        self.text = ""

    async def read(self) -> None:
        async with aclosing(generate([REQUEST], spell, self.outlet)) as updates:
            async for batch in updates:
                self.outlet.write = self.write
                self.taken.append(letters(batch))
                self.text += letters(batch)

    def write(self, updates: Updates) -> bool:
        text = letters(updates)
        if text[0] in self.refuses:
            return False
        self.written.append(text)
        self.text += text
        return True


async def test_a_step_is_one_write_and_does_not_wake_the_clients_task() -> None:
    client = Client()
    await client.read()
    assert client.text == TEXT + "."
    assert client.taken[0] == "abc" and len(client.taken) <= 3
    assert client.written[:2] == ["def", "ghi"]


async def test_the_clients_task_takes_what_the_outlet_does_not_write() -> None:
    client = Client(refuses="dj")
    await client.read()
    assert client.text == TEXT + "."
    assert client.taken[:2] == ["abc", "def"] and client.written == ["ghi"]


async def test_an_outlet_s_exception_ends_the_generation() -> None:
    client = Client()
    client.write = lambda updates: 1 // 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        await client.read()
    assert client.taken == ["abc"]


async def test_a_queue_between_two_outlets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose outlet is set, and whose task does not come back for more."""
    monkeypatch.setattr("pdserve.router.requests.generation.MAX_BEHIND", 4)
    client = Client()
    with pytest.raises(Exception, match="4 events behind"):
        async with aclosing(generate([REQUEST], spell, client.outlet)) as updates:
            async for _ in updates:
                client.outlet.write = client.write
                await asyncio.sleep(0.1)
