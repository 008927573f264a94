"""Notes what routers and nodes say of requests that stand still, while they do: afterwards, a late
answer does not tell where it was late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.access import Access, measured

STANDS = 30.0  # seconds without progress after which a request is noted
PERIOD = 5.0  # seconds between two looks at each router
LISTED = 20  # requests of a look
LAST_STAGES = 12  # of a request, that are shown
NODE_SAYS = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_remote",
    "num_preemptions_total",
    "kv_blocks_free",
)


@dataclass(frozen=True, slots=True)
class Stood:
    seconds: float  # without progress, as last seen
    words: str


class Standing:
    def __init__(self, fleet: Access) -> None:
        self._fleet = fleet
        self._found: dict[str, Stood] = {}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            for router in list(self._fleet.routers.keys() & self._fleet.pids.keys()):
                await asyncio.to_thread(self._look, router)
            await asyncio.sleep(PERIOD)

    def _look(self, router: str) -> None:
        try:
            path = f"/v1/timelines?standing=true&limit={LISTED}"
            for each in self._fleet.shown(path, router)["data"]:
                if each["standing"]["seconds"] >= STANDS:
                    self._note(router, each)
        except OSError:  # the router is dead or frozen: the next look may find the same requests
            pass

    def _note(self, router: str, found: dict[str, Any]) -> None:
        standing, request_id = found["standing"], found["request_id"]
        parts = [
            f"{request_id} at {router}: no progress for {standing['seconds']:.0f} s of "
            f"{found['seconds']:.0f} s, {found['completion_tokens']} tokens; waits for "
            f"{standing['waits_for']}"
        ]
        if standing["failures"]:
            parts.append(f"{standing['failures']} failures, the last: {standing['last_error']}")
        parts.append(f"stages: {self._stages(router, request_id)}")
        if standing["node"] is not None:
            told = ", ".join(f"{name} {value}" for name, value in standing["node"].items())
            parts.append(f"of the node, the router knows: {told}")
            parts.append(f"the node says: {self._node(router, standing['node']['node_id'])}")
        self._found[request_id] = Stood(standing["seconds"], "; ".join(parts))

    def _stages(self, router: str, request_id: str) -> str:
        found = self._fleet.shown(f"/v1/timelines/{request_id}", router)["data"]
        stages = [each for prompt in found for each in prompt["timeline"]["stages"]]
        return ", ".join(
            f"{each['name']} {each['seconds']:.1f} s ({each['node']})"
            for each in stages[-LAST_STAGES:]
        )

    def _node(self, router: str, node_id: str) -> str:
        nodes = self._fleet.state(router)["nodes"]
        for node in nodes:
            if node["node_id"] == node_id:
                try:
                    values = measured(node["metrics_address"])
                except OSError as error:
                    return f"nothing ({error})"
                return ", ".join(f"{name} {values[name]:g}" for name in NODE_SAYS if name in values)
        return "nothing (it is not registered any more)"

    def longest(self) -> list[str]:
        """Returns what was said of each request, the one that stood for longest first."""
        found = sorted(self._found.values(), key=lambda each: -each.seconds)
        return [each.words for each in found]
