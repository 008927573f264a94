"""Waiting for what a test can see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
