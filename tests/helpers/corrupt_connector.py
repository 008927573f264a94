"""Connectors whose sink corrupts landed KV, and records it in a ledger."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kv_faults import Data, Place, spoil
from pdserve.kv_transfer.connector import Event, Landed, RankContext, SinkTransfer
from pdserve.kv_transfer.connectors.base.p2p import P2PConnector
from pdserve.kv_transfer.layout import CacheView
from reread import RereadShm, RereadTCP

KINDS: dict[str, Callable[[CacheView, SinkTransfer], bool]] = {
    "any": lambda view, transfer: True,
    "indexer": lambda view, transfer: view.cache.shape[1] == 1 and view.cache.shape[5] == 16,
    "latent": lambda view, transfer: view.cache.shape[1] == 1 and view.cache.shape[5] == 40,
    "state": lambda view, transfer: view.cache.shape[4] == 1,  # one slot per block
    "window": lambda view, transfer: transfer.first_block > 0,  # if no prefix is cached
}
"""Kind → whether a transfer is of that kind of KV group, in models that have one such group."""


class Spoiler(P2PConnector):
    """A mixin for connectors that corrupts arrivals at the sink. Options: `probability` of a
    fault in each arrival, second tries included; `kind` of KV to corrupt; `seed`; `ledger`, a file
    to which each fault's name is appended."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._probability = float(options.pop("probability"))
        self._is_kind = KINDS[options.pop("kind", "any")]
        self._rng = random.Random(options.pop("seed"))
        self._ledger = os.open(options.pop("ledger"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        super().__init__(context, options)

    def is_due(self, transfer: SinkTransfer) -> bool:
        """Decides at random whether to corrupt an arrival."""
        if not transfer.block_ids or not self._is_kind(self.context.view, transfer):
            return False
        with self._lock:
            return self._rng.random() < self._probability

    def spoil(self, place: Place, before: Data) -> None:
        data = place.read()
        with self._lock:
            fault = spoil(self._rng, data, before)
        place.write(data)
        os.write(self._ledger, f"{fault.__name__}\n".encode())

    def close(self, deadline: float) -> None:
        super().close(deadline)
        os.close(self._ledger)


class Corrupt(Spoiler):
    """Corrupts KV that has landed, before the digests are compared."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        self._places: dict[bytes, tuple[Place, Data]] = {}
        self._emit = context.emit
        super().__init__(replace(context, emit=self._on_event), config)

    def accept(self, transfer: SinkTransfer) -> None:
        if self.is_due(transfer):
            view = self.context.view
            place = Place(view, view.rect, transfer.block_ids)
            self._places[transfer.transfer_id] = place, place.read()
        super().accept(transfer)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Landed) and event.transfer_id in self._places:
            self.spoil(*self._places.pop(event.transfer_id))
        self._emit(event)


class CorruptShm(Corrupt, RereadShm):
    pass


class CorruptTCP(Corrupt, RereadTCP):
    pass
