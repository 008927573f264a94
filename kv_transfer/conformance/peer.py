"""The process of a remote rank: it serves a connector by orders, one line of JSON each.

    python -m pdserve.kv_transfer.conformance.peer FD      a connected socket

It ends with the socket; some checks kill it earlier.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import msgspec
import torch

from pdserve.kv_transfer.commands import Accept, Ready, Submit, encode_event
from pdserve.kv_transfer.conformance.caches import Geometry, MemoryCache
from pdserve.kv_transfer.conformance.ends import KEYS
from pdserve.kv_transfer.connector import Event, KVConnector, RankContext
from pdserve.kv_transfer.layout import Rect
from pdserve.kv_transfer.selection import load_connector


class Setup(msgspec.Struct, tag=True):
    """Orders a connector, in place of the last one."""

    connector: str
    config: str  # JSON
    cache: str  # path of its memory file
    geometry: Geometry
    rect: Rect


class Close(msgspec.Struct, tag=True):
    pass


Order = Setup | Accept | Submit | Ready | Close


class Report(msgspec.Struct, omit_defaults=True):
    """Answers an order, or carries an event, encoded by `encode_event`."""

    endpoint: bytes = b""
    error: str = ""
    event: bytes = b""


_orders = msgspec.json.Decoder(Order)


class Peer:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._connector: KVConnector | None = None
        self._cache: MemoryCache | None = None

    def run(self) -> None:
        for line in self._sock.makefile("rb"):
            try:
                report = self._obey(_orders.decode(line))
            except Exception as error:  # the test that gave the order fails with it
                report = Report(error=repr(error))
            self._say(report)
        self._close()

    def _obey(self, order: Order) -> Report:
        match order:
            case Setup():
                return self._set_up(order)
            case Accept(transfer):
                self._live.accept(transfer)
            case Submit(transfer):
                self._live.submit(transfer)
            case Ready():
                self._live.ready(order.transfer_id, order.run, order.block_ids, order.last)
            case Close():
                self._close()
        return Report()

    @property
    def _live(self) -> KVConnector:
        if self._connector is None:
            raise RuntimeError("no connector is set up")
        return self._connector

    def _set_up(self, setup: Setup) -> Report:
        self._close()
        fd = os.open(setup.cache, os.O_RDWR | os.O_CLOEXEC)
        self._cache = MemoryCache(setup.geometry, setup.rect, fd)
        kind = load_connector(setup.connector)
        context = RankContext(self._cache.view, "127.0.0.1", "same", self._emit, KEYS)
        self._connector = kind(context, msgspec.json.decode(setup.config))
        return Report(endpoint=self._live.endpoint())

    def _emit(self, event: Event) -> None:
        self._say(Report(event=encode_event(0, event)))

    def _say(self, report: Report) -> None:
        with self._lock:
            self._sock.sendall(msgspec.json.encode(report) + b"\n")

    def _close(self) -> None:
        if self._connector is not None and self._cache is not None:
            self._connector.close(2.0)
            self._cache.close()
        self._connector = self._cache = None


def main(fd: int) -> None:
    torch.set_num_threads(1)
    Peer(socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
