"""Answers that any worker of a router gives for all of them."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.registry import Collector

from pdserve.common.obs.exposition import exposed
from pdserve.router.api.app_state import AppState
from pdserve.router.requests.timelines import Timelines
from pdserve.router.workers.merge import merged_clusters, merged_histories, merged_metrics
from pdserve.router.workers.siblings import METRICS, Siblings

_encode, _decode = msgspec.json.encode, msgspec.json.decode


class Together:
    """Asks the other workers, and answers them; a router of one process has none to ask."""

    def __init__(
        self, state: AppState, registry: Collector, siblings: Siblings | None = None
    ) -> None:
        """`registry`: what `/metrics` exposes of this process."""
        self._state = state
        self._registry = registry
        self._siblings = siblings = siblings or Siblings()
        siblings.on(METRICS, lambda _: exposed(registry))
        siblings.on("cluster", lambda _: _encode(self._cluster()))
        siblings.on("history", lambda _: _encode(state.pipeline.history.since(0)))
        siblings.on("load", lambda _: _encode(state.pipeline.load()))
        siblings.on("timelines", lambda ask: _encode(self._timelines.find(*_decode(ask))))
        siblings.on("last requests", lambda ask: _encode(self._timelines.recent(*_decode(ask))))
        siblings.on("standing", lambda ask: _encode(self._timelines.standing(*_decode(ask))))
        siblings.on("cache epoch", self._take_epoch)

    @property
    def _timelines(self) -> Timelines:
        return self._state.pipeline.timelines

    async def metrics(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        own = exposed(self._registry)
        others = await self._siblings.gather(METRICS, own)
        return merged_metrics(each.decode() for each in (own, *others)) if others else own

    async def cluster(self) -> dict[str, Any]:
        """Returns what `Pipeline.cluster` does; of several workers also `workers`."""
        own = self._cluster()
        others = await self._siblings.gather("cluster")
        return merged_clusters([own, *map(_decode, others)]) if others else own

    async def history(self, since: float) -> dict[str, Any]:
        """Returns what `History.since` does, for all workers."""
        others = await self._siblings.gather("history")
        if not others:
            return self._state.pipeline.history.since(since)
        own = self._state.pipeline.history.since(0)  # one event has the time of its first note
        merged = merged_histories([own, *map(_decode, others)])
        late = {
            name: [each for each in merged[name] if each["at"] > since]
            for name in ("samples", "events")
        }
        return merged | late

    async def load(self) -> int:
        """Returns what `Pipeline.load` does, for all workers."""
        others = await self._siblings.gather("load")
        return sum(map(_decode, others), self._state.pipeline.load())

    async def timelines(self, name: str, client: str | None) -> list[dict[str, Any]]:
        """Returns what `Timelines.find` does, for all workers."""
        own = self._timelines.find(name, client)
        others = await self._siblings.gather("timelines", _encode((name, client)))
        return own + [each for found in map(_decode, others) for each in found]

    async def last_requests(self, limit: int, client: str | None) -> list[dict[str, Any]]:
        """Returns what `Timelines.recent` does, for all workers."""
        own = self._timelines.recent(limit, client)
        others = await self._siblings.gather("last requests", _encode((limit, client)))
        if not others:
            return own
        found = own + [each for some in map(_decode, others) for each in some]
        order = sorted(found, key=lambda each: (each["status"] != "running", -each["created"]))
        return order[:limit]

    async def standing(self, limit: int, client: str | None) -> list[dict[str, Any]]:
        """Returns what `Timelines.standing` does, for all workers."""
        own = self._timelines.standing(limit, client)
        others = await self._siblings.gather("standing", _encode((limit, client)))
        found = own + [each for some in map(_decode, others) for each in some]
        return sorted(found, key=lambda each: -each["standing"]["seconds"])[:limit]

    async def reset_prefix_cache(self) -> None:
        """Switches all workers to one new epoch, so that they share prefixes."""
        await self._siblings.gather("cache epoch", self._state.cache_epoch.reset().encode())

    def _take_epoch(self, since: bytes) -> bytes:
        self._state.cache_epoch.reset(since.decode())
        return b""

    def _cluster(self) -> dict[str, Any]:
        """Returns the cluster's state, with this process's id, by which operators tell workers
        apart."""
        return {**self._state.pipeline.cluster(), "pid": os.getpid()}


TOGETHER = web.AppKey("together", Together)
