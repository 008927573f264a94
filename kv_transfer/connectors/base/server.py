"""The door of a sink rank: threads for those who may come in, few places for those who have not
said who they are."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from pdserve.common.core.throttle import LogThrottle
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

MAX_PIPES = 1024  # of sources that are known, at a time; each has a thread
MAX_STRANGERS = 64  # pipes of those who have not said who they are, at a time; each has a thread
LISTEN_PAUSE_S = 0.1  # after an accept that failed, for want of descriptors most likely

logger = logging.getLogger(__name__)


class PipeServer:
    """One thread that accepts pipes, and one for each pipe, which runs `serve(pipe)` until it
    returns or `close` interrupts it. A pipe is a stranger's until `known` is called.

    A pipe that comes when MAX_STRANGERS wait takes the place of one of them: of the host that has
    most, the one that has waited longest. An honest source says who it is within a round trip, so
    strangers would have to open as many connections in that time to keep it out. Pipes beyond
    MAX_PIPES, and those for which there may be no more threads, are closed at once. All are
    counted.
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
        self._strangers: dict[KVPipe, None] = {}  # the one that has waited longest is the first
        self._failures, self._crowds = LogThrottle(logger), LogThrottle(logger)
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                pipe = self._listener.accept()
            except ConnectionError:  # the peer's own doing
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
        """Whether there is a place for one more."""
        with self._lock:
            # Those who had to leave count until their threads have noticed.
            if len(self._pipes) >= MAX_PIPES + MAX_STRANGERS:
                return False
            if len(self._strangers) < MAX_STRANGERS:
                return True
            loser = self._longest_of_most()
            del self._strangers[loser]
            loser.interrupt()
        self._counts["dropped_stranger"] += 1
        self._crowds.warning(
            "closed a KV connection (%s) that had not said who it is: %d others wait to",
            loser.peer_host or "a host of no name", MAX_STRANGERS - 1,
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
        """The source behind it has said who it is: it keeps its place."""
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
