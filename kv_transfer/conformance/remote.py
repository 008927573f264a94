"""A rank in its own process, which can be stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from pdserve.common.core.host import helper_environment
from pdserve.kv_transfer.commands import Accept, Ready, Submit, decode_event
from pdserve.kv_transfer.conformance.caches import MemoryCache
from pdserve.kv_transfer.conformance.ends import End, Target
from pdserve.kv_transfer.conformance.peer import Close, Order, Report, Setup
from pdserve.kv_transfer.connector import Event, SinkTransfer, SourceTransfer

START_S = 60.0  # within which a process has started
ANSWER_S = 15.0  # within which it answers an order

_reports = msgspec.json.Decoder(Report)


def start_peer(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Returns a process that serves `sock`."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "pdserve.kv_transfer.conformance.peer", str(sock.fileno())],
        pass_fds=[sock.fileno()],
        env=helper_environment({"PYTHONPATH": path}),
    )


class Process:
    """Runs a Python process that serves one connector after another for `RemoteEnd`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = start_peer(theirs)
        theirs.close()
        self._sock = ours
        self._lines = ours.makefile("rb")
        self.on_event: Callable[[Event], None] = lambda event: None
        self._reports: list[Report] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="kv-conformance-peer", daemon=True)
        self._reader.start()

    def order(self, order: Order, within: float = ANSWER_S) -> Report:
        """Sends an order and waits for the answer."""
        with self._changed:
            self._reports.clear()
        self._sock.sendall(msgspec.json.encode(order) + b"\n")
        with self._changed:
            self._changed.wait_for(lambda: self._reports or not self.alive, within)
            assert self._reports, "the other process does not answer: did a method block?"
            report = self._reports[0]
        assert not report.error, f"in the other process: {report.error}"
        return report

    def _read(self) -> None:
        for line in self._lines:
            report = _reports.decode(line)
            if report.event:
                self.on_event(decode_event(report.event)[1])
                continue
            with self._changed:
                self._reports.append(report)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._lines.close()
        self._sock.close()


class RemoteEnd(End):
    """Runs a rank in another process, which can be stopped and killed; its cache is shared."""

    def __init__(self, target: Target, cache: MemoryCache, process: Process) -> None:
        super().__init__(cache)
        self.process = process
        process.on_event = self.events.put
        config = json.dumps(dict(target.config))
        setup = Setup(target.name, config, cache.path, cache.geometry, cache.rect)
        self._endpoint = process.order(setup, START_S).endpoint

    def endpoint(self) -> bytes:
        return self._endpoint

    def accept(self, transfer: SinkTransfer) -> None:
        self.process.order(Accept(transfer))

    def submit(self, transfer: SourceTransfer) -> None:
        self.process.order(Submit(transfer))

    def ready(self, order: Ready) -> None:
        assert not order.digest, "`ready_hashed` is checked in this process only"
        self.process.order(order)

    def stop(self) -> None:
        self.process.signal(signal.SIGSTOP)
        time.sleep(0.05)

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Closes the connector, after which the process may serve another. Raises if it cannot."""
        self.resume()
        try:
            self.process.order(Close())
        except (AssertionError, OSError):
            self.kill()
            raise
