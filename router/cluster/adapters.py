"""The LoRA adapters that clients use as models, by name. A request keeps the adapter that it began
with, even if the name gets another one. Nodes know adapters by digest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import ModelNotFound
from pdserve.common.core.lora import read_adapter
from pdserve.router.cluster.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    path: str  # its folder
    digest: str  # identifies what it computes
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, seconds


class ServedAdapters:
    """The served adapters, and unloaded ones that requests in flight still use."""

    def __init__(self, adapters: Iterable[Adapter] = ()) -> None:
        self._served = {each.name: each for each in adapters}
        self._in_use: Counter[Adapter] = Counter()  # requests that use each adapter
        self._running: Counter[Adapter] = Counter()  # requests with a slot

    def served(self) -> list[Adapter]:
        return list(self._served.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._served)

    def find(self, name: str | None) -> Adapter | None:
        return self._served.get(name or "")

    def add(self, adapter: Adapter) -> None:
        """Replaces an adapter of the same name."""
        self._served[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Raises ModelNotFound."""
        if self._served.pop(name, None) is None:
            raise ModelNotFound(f"The adapter `{name}` is not loaded.", param="lora_name")

    def using(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Counts a request that uses the adapter, which nodes must have meanwhile."""
        return _counted(self._in_use, adapter)

    def running(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Counts a request that has a slot."""
        return _counted(self._running, adapter)

    def at_work(self) -> tuple[list[str], list[str]]:
        """Returns the names of adapters of running requests, and of waiting ones."""
        waiting = {each.name for each in self._in_use - self._running}
        return sorted({each.name for each in self._running}), sorted(waiting)

    def wanted(self) -> dict[str, str]:
        """Returns the adapters that nodes must have: folders by digest."""
        return {each.digest: each.path for each in (*self._in_use, *self._served.values())}


@contextmanager
def _counted(users: Counter[Adapter], adapter: Adapter | None) -> Iterator[None]:
    if adapter is None:
        yield
        return
    users[adapter] += 1
    try:
        yield
    finally:
        users[adapter] -= 1
        if not users[adapter]:
            del users[adapter]


class AdaptersCollector(Collector):
    """vLLM's metric of adapters: one series; its labels name the adapters in use."""

    def __init__(self, adapters: ServedAdapters, max_loras: int) -> None:
        self._adapters = adapters
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._adapters.at_work()
        labels = {
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
            "max_lora": str(self._max_loras),
        }
        gauge = GaugeMetricFamily(
            "pdserve_lora_requests_info",
            "LoRA adapters of requests that run and that wait; the value is the time (Unix)",
            labels=tuple(labels),
        )
        gauge.add_metric(tuple(labels.values()), time.time())
        yield gauge


def read_adapters(config: LoRAConfig, model: ServedModel) -> ServedAdapters:
    """Reads --lora-modules.

    Raises:
        ConfigError: an adapter cannot be served.
    """
    config.check_names(model.names)
    found = []
    for name, path in config.modules.items():
        path = str(Path(path).resolve())
        file = read_adapter(path, model.native, config.max_lora_rank)
        found.append(Adapter(name, path, file.digest))
    return ServedAdapters(found)
