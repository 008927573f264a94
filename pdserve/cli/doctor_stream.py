"""Finds a proxy that holds events back. What comes first decides, not how fast it comes: when the
first event of a stream is here, the router is asked whether it still generates that stream. If so,
nothing holds events back. If not, the stream may also have ended while this process stood still on
a busy machine; so that counts only if this process ran, and only if several streams agree.
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

TOKENS = (256, 512, 1024, 1024, 1024, 1024)  # of the streams: the more, the longer they take
HELD = 3  # streams that must be held back before that is said
ASKED = 8  # times whether a stream runs: a balancer may ask another router first
BEAT = 0.005  # seconds between two signs that this process runs
STOOD_STILL = 0.5  # share of a generation; who has stood still for so long may have missed it
_UNBUFFER = "switch off buffering of text/event-stream in the proxy (nginx: proxy_buffering off)"


async def stream(server: Server, most: int) -> Finding:
    """Says whether events pass while their stream is generated. `most`: tokens of a context.

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
            seen = (
                "its router is not found, which would tell whether events of a stream are held back"
            )
            return Finding("stream", Verdict.WARNING, seen, "ask one router at its own URL")
        if told.get("status") == "running":
            return Finding("stream", Verdict.OK, "events come while their stream is generated")
        took = _took(told)
        if pulse.longest < STOOD_STILL * took:
            held.append(took)
        if len(held) == HELD:
            seen = (
                f"each of {HELD} streams came when its last token had been made, "
                f"{1e3 * min(held):.0f} ms or more after the first: a proxy holds them back"
            )
            return Finding("stream", Verdict.FAILED, seen, _UNBUFFER)
    seen = f"{len(TOKENS)} streams were too short, or this machine too busy, to find a proxy"
    return Finding("stream", Verdict.WARNING, seen, "run it again on a machine that is less busy")


async def _at_first_event(
    server: Server, model: str, tokens: int
) -> tuple[Mapping[str, Any], _Pulse]:
    """Begins a stream. Returns what the router says of it once its first event is here, empty if
    it does not know the stream; and how this process ran meanwhile."""
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
            return await _told(server, str(event["id"])), pulse
    return {}, pulse


async def _told(server: Server, name: str) -> Mapping[str, Any]:
    """Asks the router for the request `name`; empty if none knows it: a proxy may not pass this on,
    a balancer may ask other routers, and a router may keep no timelines."""
    for _ in range(ASKED):
        with suppress(PdserveError):
            found = await server.get(f"/v1/timelines/{quote(name, safe='')}")
            told: Mapping[str, Any] = found["data"][0]
            return told
    return {}


def _took(told: Mapping[str, Any]) -> float:
    """The seconds from a stream's first to its last token, at the router."""
    line = told.get("timeline", {})
    return (line.get("finished") or 0.0) - (line.get("first_token") or 0.0)


@dataclass(slots=True)
class _Pulse:
    """How long this process stood still, in seconds."""

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
