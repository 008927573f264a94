"""Waiting for what a test can see."""

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
    """Waits as `eventually` does, where no loop runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.002)


async def unless_busy(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks until it is not for lack of time that a body is refused: a busy host has not even as
    much as hostile bodies get."""
    while True:
        try:
            return await ask()
        except Unavailable as error:
            assert error.code == "PREPARATION_FAILED" and "too busy" in error.message, error
