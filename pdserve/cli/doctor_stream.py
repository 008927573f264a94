"""Finds a proxy that holds events back. The order of events decides, not their speed: when the
first event of a stream arrives, the router is asked whether it is still generating that stream. If
it is, no proxy holds events back. If it is not, the stream may also have ended while this process
was not scheduled on a busy machine; so such a stream counts only if this process was running, and
only if several streams agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import quote

from pdserve.cli.finding import Finding, Verdict
from pdserve.client.server import Server
from pdserve.common.core.errors import DeadlineExceeded, PdserveError

TOKENS = (256, 512, 1024, 1024, 1024, 1024)  # max_tokens of each stream
HELD = 3  # streams that must be held back to report a proxy
ASKED = 8  # tries to find a stream's router behind a balancer
BEAT = 0.005  # seconds between two beats of `_Pulse`
STOOD_STILL = 0.5  # longest pause of this process, as a share of the generation
_UNBUFFER = "switch off buffering of text/event-stream in the proxy (nginx: proxy_buffering off)"


async def stream(server: Server, most: int) -> Finding:
    """Checks that events arrive while their stream is generated. `most`: tokens of the context.

    Raises:
        PdserveError: the server refuses a stream, or a stream ends early.
    """
    model, held = await server.model(), list[float]()
    for tokens in TOKENS:
        try:
            told, pulse = await _at_first_event(server, model, min(tokens, most // 2))
        except DeadlineExceeded:
            seen = "no event came in time: a proxy holds them back, or nodes are slow"
            return Finding("stream", Verdict.FAILED, seen, f"{_UNBUFFER}; else a longer --timeout")
        if not told:
            seen = "no router knows the stream, so it is unknown whether a proxy holds events back"
            return Finding("stream", Verdict.WARNING, seen, "ask one router at its own URL")
        if told.get("status") == "running":
            return Finding("stream", Verdict.OK, "events come while their stream is generated")
        took = _took(told)
        if pulse.longest < STOOD_STILL * took:
            held.append(took)
        if len(held) == HELD:
            seen = (
                f"{HELD} streams began to arrive after their last token was generated, "
                f"{1e3 * min(held):.0f} ms or more after the first: a proxy holds them back"
            )
            return Finding("stream", Verdict.FAILED, seen, _UNBUFFER)
    seen = f"{len(TOKENS)} streams were too short, or this machine too busy, to find a proxy"
    return Finding("stream", Verdict.WARNING, seen, "run it again on a machine that is less busy")


async def _at_first_event(
    server: Server, model: str, tokens: int
) -> tuple[Mapping[str, Any], _Pulse]:
    """Begins a stream and waits for its first event. Returns the router's state of the stream at
    that time, empty if unknown, and this process's pulse meanwhile."""
    body = {
        "model": model,
        "prompt": "a b c",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with _beating() as pulse, aclosing(server.stream("/v1/completions", body)) as events:
        async for event in events:
            return await _state_of(server, str(event["id"])), pulse
    return {}, pulse


async def _state_of(server: Server, name: str) -> Mapping[str, Any]:
    """Asks the router for the request `name`. Returns an empty mapping if it is not found: a proxy
    may block the path, a balancer may ask other routers, and a router may keep no timelines."""
    for _ in range(ASKED):
        with suppress(PdserveError):
            found = await server.get(f"/v1/timelines/{quote(name, safe='')}")
            told: Mapping[str, Any] = found["data"][0]
            return told
    return {}


def _took(told: Mapping[str, Any]) -> float:
    """Returns the seconds from a stream's first to its last token, at the router."""
    line = told.get("timeline", {})
    return (line.get("finished") or 0.0) - (line.get("first_token") or 0.0)


@dataclass(slots=True)
class _Pulse:
    """Measures the longest pause of this process, in seconds."""

    longest: float = 0.0
    last: float = field(default_factory=monotonic)

    def beat(self) -> None:
        now = monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now

    async def run(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.beat()


@asynccontextmanager
async def _beating() -> AsyncIterator[_Pulse]:
    pulse = _Pulse()
    task = asyncio.create_task(pulse.run())
    try:
        yield pulse
    finally:
        pulse.beat()
        task.cancel()
        await asyncio.wait([task])
