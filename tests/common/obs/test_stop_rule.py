"""start → serve → drain → stop: what each signal and failure leads to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from pdserve.common.core.errors import NodeError
from pdserve.common.obs.process import serve_until_stopped

Failed = asyncio.Future[None]


async def serve(act: Callable[[Failed], None], drains: bool = True, timeout: float = 5) -> int:
    """Runs the rule; `act` happens once it waits."""
    loop = asyncio.get_running_loop()
    failed: Failed = loop.create_future()

    async def drain() -> None:
        if not drains:
            await asyncio.sleep(60)

    loop.call_later(0.02, act, failed)
    try:
        return await asyncio.wait_for(serve_until_stopped(failed, drain, timeout), 10)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def signals(*numbers: signal.Signals) -> Callable[[Failed], None]:
    def send(failed: Failed) -> None:
        for delay, number in enumerate(numbers):
            asyncio.get_running_loop().call_later(0.05 * delay, os.kill, os.getpid(), number)

    return send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    assert await serve(signals(number)) == 0


async def test_a_second_signal_stops_at_once() -> None:
    assert await serve(signals(signal.SIGTERM, signal.SIGINT), drains=False) == 0


async def test_a_drain_that_takes_too_long_is_a_failure() -> None:
    assert await serve(signals(signal.SIGTERM), drains=False, timeout=0.1) == 1


async def test_a_failure_ends_it_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    error = NodeError("rank 1 died", code="RANK_DIED")
    assert await serve(lambda failed: failed.set_exception(error)) == 1
    assert "[RANK_DIED, blame=node] rank 1 died" in caplog.text


async def test_a_failure_during_the_drain_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def act(failed: Failed) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, failed.set_exception, ValueError("a defect"))

    assert await serve(act, drains=False) == 1
    assert "ValueError: a defect" in caplog.text
