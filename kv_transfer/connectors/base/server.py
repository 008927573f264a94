"""The server of a sink rank: a thread for each pipe, and few places for pipes without a
greeting."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from pdserve.common.core.throttle import LogThrottle
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

MAX_PIPES = 1024  # of admitted sources at a time; each has a thread
MAX_STRANGERS = 64  # pipes without a complete greeting, at a time; each has a thread
LISTEN_PAUSE_S = 0.1  # after an accept that failed, most likely for lack of descriptors

logger = logging.getLogger(__name__)


class PipeServer:
    """Accepts pipes on one thread and runs `serve(pipe)` on a thread for each, until it returns or
    `close` interrupts it. A pipe is a stranger until `known` is called.

    A pipe that comes when there are MAX_STRANGERS replaces one of them: of the host that has most,
    the one that has waited longest. An honest source greets within a round trip, so
    strangers would have to open that many connections in this time to keep it out. A pipe beyond
    MAX_PIPES, or for which no thread can be started, is closed at once. All are counted.
    """

    def __init__(
        self, listener: PipeListener, serve: Callable[[KVPipe], None], counts: Counter[str]
    ) -> None:
        self.endpoint = listener.endpoint
        self._listener = listener
        self._serve = serve
        self._counts = counts
        self._lock = threading.Lock()
        self._pipes: dict[KVPipe, threading.Thread] = {}
        self._strangers: dict[KVPipe, None] = {}  # the oldest first
        self._failures, self._crowds = LogThrottle(logger), LogThrottle(logger)
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                pipe = self._listener.accept()
            except ConnectionError:  # the peer's fault
                self._counts["refused_connection"] += 1
                continue
            except OSError as error:
                if not self._closing:
                    self._failures.warning("cannot accept a KV connection: %s", error)
                    time.sleep(LISTEN_PAUSE_S)  # do not spin
                continue
            if not self._make_room() or not self._start(pipe):
                self._counts["refused_connection"] += 1
                pipe.close()

    def _make_room(self) -> bool:
        """Makes a place for one more pipe; returns whether there is one."""
        with self._lock:
            # A pipe that was interrupted counts until its thread has ended.
            if len(self._pipes) >= MAX_PIPES + MAX_STRANGERS:
                return False
            if len(self._strangers) < MAX_STRANGERS:
                return True
            loser = self._longest_of_most()
            del self._strangers[loser]
            loser.interrupt()
        self._counts["dropped_stranger"] += 1
        self._crowds.warning(
            "closed a KV connection from %s that had sent no greeting: %d others are waiting",
            loser.peer_host or "an unknown host", MAX_STRANGERS - 1,
        )  # fmt: skip
        return True

    def _longest_of_most(self) -> KVPipe:
        hosts = Counter(pipe.peer_host for pipe in self._strangers)
        ((most, _),) = hosts.most_common(1)
        return next(pipe for pipe in self._strangers if pipe.peer_host == most)

    def _start(self, pipe: KVPipe) -> bool:
        thread = threading.Thread(target=self._run, args=(pipe,), name="kv-sink", daemon=True)
        with self._lock:
            try:
                thread.start()
            except RuntimeError as error:  # the host or the container allows no more threads
                self._failures.warning("cannot serve a KV connection: %s", error)
                return False
            self._pipes[pipe] = thread
            self._strangers[pipe] = None
            if self._closing:
                pipe.interrupt()
        return True

    def known(self, pipe: KVPipe) -> None:
        """Marks the source as admitted: its pipe keeps its place."""
        with self._lock:
            self._strangers.pop(pipe, None)

    def _run(self, pipe: KVPipe) -> None:
        try:
            self._serve(pipe)
        finally:
            with self._lock:
                del self._pipes[pipe]
                self._strangers.pop(pipe, None)
                pipe.close()

    def close(self, deadline: float) -> None:
        """Ends all threads; `deadline` is in seconds from now."""
        end = time.monotonic() + deadline
        with self._lock:
            self._closing = True
            threads = list(self._pipes.values())
            for pipe in self._pipes:
                pipe.interrupt()
        self._listener.interrupt()
        for thread in (self._acceptor, *threads):
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()
