"""Wherever a request stands still, the router says what it waits for, since when and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fake_nodes import FakeCluster, fails, fake_cluster, hangs
from pdserve.common.core.errors import Blame, NodeError

QUEUE, STUCK = 30.0, 300.0  # seconds, --queue-timeout and --request-timeout
NO = NodeError("it will not", code="INTERNAL_ODDITY", blame=Blame.DECODE)


@asynccontextmanager
async def asked(cluster: FakeCluster) -> AsyncIterator[None]:
    """A request under way."""
    asking = asyncio.create_task(cluster.ask())
    try:
        yield
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def standing(cluster: FakeCluster, words: str, failures: int = 0) -> dict[str, Any]:
    """Waits until a request waits for this, after so many failures, and returns what is said of
    it."""
    async with asyncio.timeout(30):
        while True:
            for each in cluster.pipeline.timelines.standing(9):
                found: dict[str, Any] = each["standing"]
                if words in found["waits_for"] and found["failures"] >= failures:
                    return found
            await asyncio.sleep(0.005)


def stands_in(where: str, count: int | None = None) -> Callable[[FakeCluster], None]:
    def stop(cluster: FakeCluster) -> None:
        if count is None:
            cluster[where].on_run = hangs
        else:
            cluster[where].on_token = {count: hangs}

    return stop


@pytest.mark.parametrize(
    ("stop", "words", "node"),
    [
        (stands_in("d0"), "d0 to reserve KV blocks", "d0"),
        (stands_in("p0"), "p0 to compute the prompt", "p0"),
        (stands_in("p0", 1), "d0 to get the rest of the KV", "d0"),
        (stands_in("d0", 3), "d0 to make the next token", "d0"),
    ],
)
async def test_a_node_that_stands_still_is_named_with_its_load(
    tmp_path: Path, stop: Callable[[FakeCluster], None], words: str, node: str
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=STUCK) as cluster:
        stop(cluster)
        async with asked(cluster):
            found = await standing(cluster, words)
            assert found["node"]["node_id"] == node and found["node"]["state"] == "ready"
            assert STUCK - 60 < found["gives_up_in"] < STUCK + 2
            assert (found["failures"], found["last_error"]) == (0, None)
            assert 0 <= found["seconds"] <= cluster.pipeline.timelines.longest_standing() + 1
        assert cluster.pipeline.timelines.standing(9) == []


async def test_waiting_in_the_router_is_described(tmp_path: Path) -> None:
    routing = {"queue_timeout": QUEUE, "max_concurrent_requests": 1, "max_client_share": 1.0}
    async with fake_cluster(tmp_path, ("p0",), **routing) as cluster, asked(cluster):
        found = await standing(cluster, "a decode node")
        assert found["node"] is None and 0 < found["gives_up_in"] <= QUEUE
        async with asked(cluster):
            found = await standing(cluster, "a slot")
            assert 0 < found["gives_up_in"] <= QUEUE
            oldest, newest = cluster.pipeline.timelines.standing(9)
            assert oldest["standing"]["seconds"] >= newest["standing"]["seconds"]


async def test_earlier_failures_are_reported_and_a_pause_is_no_progress(tmp_path: Path) -> None:
    routing = {"queue_timeout": QUEUE, "migration_limit": 99, "breaker_failures": 99}
    async with fake_cluster(tmp_path, ("p0", "d0"), **routing) as cluster:
        cluster["d0"].on_run = fails(NO)
        async with asked(cluster):
            first = await standing(cluster, "a pause after")
            assert first["failures"] > 1 and "INTERNAL_ODDITY" in first["last_error"]
            later = await standing(cluster, "a pause after", first["failures"] + 1)
            assert later["seconds"] > first["seconds"] and later["gives_up_in"] < QUEUE


async def test_without_a_bound_none_is_said(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=0.0) as cluster:
        cluster["d0"].on_token = {3: hangs}
        async with asked(cluster):
            assert (await standing(cluster, "next token"))["gives_up_in"] is None
