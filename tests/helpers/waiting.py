"""Waiting for what a test can see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


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
