"""One rank under test: a connector over its cache, and the events it reported."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.kv_transfer.commands import Ready
from pdserve.kv_transfer.conformance.caches import MemoryCache
from pdserve.kv_transfer.connector import (
    Event,
    Failed,
    KVConnector,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.selection import load_connector

QUICK_S = 2.0  # within which a call that must not block returns, on a busy machine too
ARRIVAL_S = 10.0  # within which a required event comes
DEATH_S = 8.0  # within which a peer's death is noticed
SETTLE_S = 0.2  # within which a forbidden event would come
CLOSE_S = 5.0
LOOKS = 20  # checks within such a time, so that a paused process has checked once
KEYS = (b"the key of the ranks of the kit!",)  # the default of all ranks

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Target:
    """Names the connector under test, with its options."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> type[KVConnector]:
        return load_connector(self.name)


class EventLog:
    """Records the events of one connector, in order. It is thread-safe."""

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda event: None  # on the connector's thread
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        self.on_event(event)
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[E], transfer_id: bytes) -> list[E]:
        with self._changed:
            found = [each for each in self._events if isinstance(each, kind)]
        return [each for each in found if each.transfer_id == transfer_id]

    def all(self) -> list[Event]:
        with self._changed:
            return list(self._events)

    def wait(
        self, kind: type[E], transfer_id: bytes, within: float = ARRIVAL_S, epoch: int = 1
    ) -> E:
        """Returns the first such event; the test fails if there is none, or a Failed instead. A
        Failed of an epoch before `epoch` is ignored: that attempt was cancelled."""

        def find() -> Event | None:
            return next((each for each in self._events if wanted(each)), None)

        def wanted(event: Event) -> bool:
            failed = isinstance(event, Failed) and event.epoch >= epoch
            return event.transfer_id == transfer_id and (failed or isinstance(event, kind))

        with self._changed:
            self._changed.wait_for(find, within)
            found = find()
        assert isinstance(found, kind), (
            f"no {kind.__name__} within {within} s but {found}; all events: {self.all()}"
        )
        return found


class End(ABC):
    """Offers the core's view of a rank."""

    def __init__(self, cache: MemoryCache) -> None:
        self.cache = cache
        self.events = EventLog()

    @abstractmethod
    def endpoint(self) -> bytes: ...

    @abstractmethod
    def accept(self, transfer: SinkTransfer) -> None: ...

    @abstractmethod
    def submit(self, transfer: SourceTransfer) -> None: ...

    @abstractmethod
    def ready(self, order: Ready) -> None:
        """With `order.digest` the run is announced by `ready_hashed`."""

    @abstractmethod
    def close(self) -> None: ...


class LocalEnd(End):
    """Runs a rank in this process. A call that does not return in time fails the test."""

    def __init__(
        self,
        target: Target,
        cache: MemoryCache,
        fingerprint: str = "same",
        keys: tuple[bytes, ...] = KEYS,
    ) -> None:
        super().__init__(cache)
        context = RankContext(cache.view, "127.0.0.1", fingerprint, self.events.put, keys)
        self.connector = target.load()(context, target.config)
        self._closed = False

    def endpoint(self) -> bytes:
        return self._call(self.connector.endpoint)

    def accept(self, transfer: SinkTransfer) -> None:
        self._call(self.connector.accept, transfer)

    def submit(self, transfer: SourceTransfer) -> None:
        self._call(self.connector.submit, transfer)

    def ready(self, order: Ready) -> None:
        ready = self.connector.ready_hashed if order.digest else self.connector.ready
        self._call(ready, order.transfer_id, order.run, order.block_ids, order.last)

    def quiesce(self, transfer_id: bytes) -> None:
        self._call(self.connector.quiesce, transfer_id, within=2 * QUICK_S)

    def release(self, transfer_id: bytes) -> None:
        self._call(self.connector.release, transfer_id, within=2 * QUICK_S)

    def close(self, deadline: float = CLOSE_S) -> None:
        if not self._closed:
            self._closed = True
            self._call(self.connector.close, deadline, within=deadline + QUICK_S)

    def _call(self, method: Callable[..., Any], *args: Any, within: float = QUICK_S) -> Any:
        return bounded(method, *args, within=within)


def bounded(method: Callable[..., Any], *args: Any, within: float) -> Any:
    """Calls `method` on another thread; its exception is raised here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((method(*args), None))
        except Exception as error:  # raised again below
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="kv-conformance-call", daemon=True)
    thread.start()
    for _ in range(LOOKS):
        thread.join(within / LOOKS)
    assert outcome, (
        f"`{method.__name__}` has not returned after {within:g} s: no method blocks, but for "
        "`quiesce` (a fraction of a second when a peer stalls) and `close` (its deadline)"
    )
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
