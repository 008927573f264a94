"""The sinks of a node's replicas behind its one address."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.sink import KVSink


class Sinks:
    """A call names a transfer and no replica: whoever sends it knows of none."""

    def __init__(self, sinks: Sequence[KVSink]) -> None:
        """At least one."""
        self._sinks = sinks

    def of(self, transfer_id: bytes) -> KVSink:
        """The sink that issued the transfer's ticket; for a transfer unknown to all, one that will
        say so."""
        return next((each for each in self._sinks if each.knows(transfer_id)), self._sinks[0])
