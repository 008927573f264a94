"""Connectors that tests name by "module:Class": a slow network, and one that breaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pdserve.kv_transfer.connector import RankContext
from pdserve.kv_transfer.connectors.base.channel import Mover, PipeMover
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.frame import Frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.pipe import KVPipe


class SlowTCP(TCPConnector):
    """TCP that waits `delay` seconds before it delivers a run, and then fails if `breaks`."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._delay = float(options.pop("delay"))
        self._breaks = bool(options.pop("breaks", False))
        super().__init__(context, options)

    def mover(self, pipe: KVPipe) -> Mover:
        return SlowMover(self.context.view, pipe, self._delay, self._breaks)


class SlowMover(PipeMover):
    def __init__(self, view: CacheView, pipe: KVPipe, delay: float, breaks: bool) -> None:
        super().__init__(view, pipe)
        self._delay = delay
        self._breaks = breaks

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        time.sleep(self._delay)
        if self._breaks:
            raise ConnectionError("this connector breaks on purpose")
        return super().send(frame, block_ids, gate)
