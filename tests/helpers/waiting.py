"""Waits for conditions that a test can check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pdserve.common.core.errors import Unavailable

T = TypeVar("T")


async def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Like `eventually`, without an event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not true after {seconds} s"
        time.sleep(0.002)


async def unless_busy(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeats `ask` while the refusal is only for lack of time: a busy host may not even have the
    time that hostile bodies get."""
    while True:
        try:
            return await ask()
        except Unavailable as error:
            assert error.code == "PREPARATION_FAILED" and "too busy" in error.message, error
