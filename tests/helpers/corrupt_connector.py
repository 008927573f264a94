"""Connectors whose sink corrupts landed KV, and records it in a ledger."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kv_faults import Place, spoil
from pdserve.kv_transfer.connector import Event, Landed, RankContext, SinkTransfer
from pdserve.kv_transfer.connectors.base.p2p import P2PConnector
from pdserve.kv_transfer.layout import CacheView
from reread import RereadShm, RereadTCP

KINDS: dict[str, Callable[[CacheView, SinkTransfer], bool]] = {
    "any": lambda view, transfer: True,
    "indexer": lambda view, transfer: view.cache.shape[1] == 1,  # keys without values
    "latent": lambda view, transfer: view.cache.shape[1] == 1,
    "state": lambda view, transfer: view.cache.shape[4] == 1,  # one slot a block
    "window": lambda view, transfer: transfer.first_block > 0,  # where no prefix is cached
}
"""Recognizes the KV of a group, in models that have one such group."""


class Corrupt(P2PConnector):
    """A mixin for connectors. Options: `probability` of corruption per arrival, repeated ones
    included; `kind` of KV to corrupt; `seed`; `ledger`, a file that gets a line with the fault's
    name per corruption."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._probability = float(options.pop("probability"))
        self._is_kind = KINDS[options.pop("kind", "any")]
        self._rng = random.Random(options.pop("seed"))
        self._ledger = os.open(options.pop("ledger"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._places: dict[bytes, tuple[Place, np.ndarray]] = {}
        super().__init__(replace(context, emit=self._on_event), options)
        self._emit = context.emit

    def accept(self, transfer: SinkTransfer) -> None:
        view = self.context.view
        if transfer.block_ids and self._is_kind(view, transfer):
            place = Place(view, view.rect, transfer.block_ids)
            self._places[transfer.transfer_id] = place, place.read()
        super().accept(transfer)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Landed) and event.transfer_id in self._places:
            place, before = self._places.pop(event.transfer_id)
            if self._rng.random() < self._probability:
                self._spoil(place, before)
        self._emit(event)

    def _spoil(self, place: Place, before: np.ndarray) -> None:
        data = place.read()
        fault = spoil(self._rng, data, before)
        place.write(data)
        os.write(self._ledger, f"{fault.__name__}\n".encode())

    def close(self, deadline: float) -> None:
        super().close(deadline)
        os.close(self._ledger)


class CorruptShm(Corrupt, RereadShm):
    pass


class CorruptTCP(Corrupt, RereadTCP):
    pass
