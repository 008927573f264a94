"""Connectors that tests name by "module:Class": slow, failing, or unable to quiesce."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdserve.kv_transfer.connector import RankContext
from pdserve.kv_transfer.connectors.base.channel import Mover, PipeMover
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.frame import Frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.pipe import KVPipe


class SlowTCP(TCPConnector):
    """TCP that delays each run by `delay` seconds, and while the file `held` exists, and then fails
    if `breaks`."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._delay = float(options.pop("delay"))
        self._breaks = bool(options.pop("breaks", False))
        self._held = options.pop("held", "")
        super().__init__(context, options)

    def mover(self, pipe: KVPipe) -> Mover:
        return SlowMover(self.context.view, pipe, self._wait)

    def _wait(self) -> None:
        time.sleep(self._delay)
        while self._held and Path(self._held).exists():
            time.sleep(0.005)
        if self._breaks:
            raise ConnectionError("this connector breaks on purpose")


class SlowMover(PipeMover):
    def __init__(self, view: CacheView, pipe: KVPipe, wait: Callable[[], None]) -> None:
        super().__init__(view, pipe)
        self._wait = wait

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        self._wait()
        return super().send(frame, block_ids, gate)


class ClingingTCP(TCPConnector):
    """TCP whose `quiesce` fails if `clings`, so that blocks may still be in use."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._clings = options.pop("clings")
        super().__init__(context, options)

    def quiesce(self, transfer_id: bytes) -> None:
        if self._clings:
            raise OSError("a device does not answer")
        super().quiesce(transfer_id)
