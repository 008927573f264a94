"""Connectors that tests name by "module:Class": a slow network, and one that breaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pdserve.kv_transfer.connector import RankContext
from pdserve.kv_transfer.connectors.base.frame import Frame
from pdserve.kv_transfer.connectors.base.links import Channel
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.gate import Gate


class SlowTCP(TCPConnector):
    """TCP that waits `delay` seconds before it delivers a run, and then fails if `breaks`."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        options = dict(config)
        self._delay = float(options.pop("delay"))
        self._breaks = bool(options.pop("breaks", False))
        super().__init__(context, options)

    def dial(self, endpoint: bytes) -> Channel:  # type: ignore[override]
        return SlowChannel(super().dial(endpoint), self._delay, self._breaks)


class SlowChannel(Channel):
    def __init__(self, channel: Channel, delay: float, breaks: bool) -> None:
        self._channel = channel
        self._delay = delay
        self._breaks = breaks

    def begin(self, frame: Frame) -> None:
        self._channel.begin(frame)

    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        time.sleep(self._delay)
        if self._breaks:
            raise ConnectionError("this connector breaks on purpose")
        return self._channel.deliver(frame, block_ids, gate)

    def alive(self) -> bool:
        return self._channel.alive()

    def interrupt(self) -> None:
        self._channel.interrupt()

    def close(self) -> None:
        self._channel.close()
