"""LoRA adapters as clients know them: models by name, of which each request keeps the one that it
began with, whatever the name comes to mean. Nodes know digests alone."""

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
from pdserve.common.core.errors import ConfigError, ModelNotFound
from pdserve.common.core.lora import read_adapter
from pdserve.common.core.model_spec import ModelSpec
from pdserve.router.cluster.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    path: str  # of its folder
    digest: str  # of what it computes
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, seconds


class ServedAdapters:
    """Those that are served, and those that only requests under way still have."""

    def __init__(self, adapters: Iterable[Adapter] = ()) -> None:
        self._served = {each.name: each for each in adapters}
        self._in_use: Counter[Adapter] = Counter()  # by how many requests
        self._running: Counter[Adapter] = Counter()  # by how many of them that have a place

    def served(self) -> list[Adapter]:
        return list(self._served.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._served)

    def find(self, name: str | None) -> Adapter | None:
        return self._served.get(name or "")

    def add(self, adapter: Adapter) -> None:
        """Also in the place of one by the same name."""
        self._served[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Raises ModelNotFound."""
        if self._served.pop(name, None) is None:
            raise ModelNotFound(f"The adapter `{name}` is not loaded.", param="lora_name")

    def using(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """While a request has it, nodes are to have it."""
        return _counted(self._in_use, adapter)

    def running(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Inside `using`: the request waits for no place any more."""
        return _counted(self._running, adapter)

    def at_work(self) -> tuple[list[str], list[str]]:
        """Names of those that requests have which run, and which wait."""
        waiting = {each.name for each in self._in_use - self._running}
        return sorted({each.name for each in self._running}), sorted(waiting)

    def wanted(self) -> dict[str, str]:
        """What nodes are to have: folders by digest."""
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
    """As vLLM shows them: one series, whose labels say which ones are at work now."""

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
    """Of --lora-modules.

    Raises:
        ConfigError: one of them cannot be served.
    """
    found = []
    for name, path in config.modules.items():
        if name in model.names:
            raise ConfigError(f"--lora-modules {name}: the model itself has this name")
        path = str(Path(path).resolve())
        file = read_adapter(path, ModelSpec.from_folder(model.root), config.max_lora_rank)
        found.append(Adapter(name, path, file.digest))
    return ServedAdapters(found)
