"""A sink's door: one thread that accepts pipes, one thread for each pipe."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

logger = logging.getLogger(__name__)


MAX_PIPES = 1024  # at a time; each has a thread


class PipeServer:
    """Runs `serve(pipe)` on a thread per pipe until it returns or `close` interrupts it. Pipes
    beyond MAX_PIPES are closed at once and counted."""

    def __init__(
        self, listener: PipeListener, serve: Callable[[KVPipe], None], counts: Counter[str]
    ) -> None:
        self.endpoint = listener.endpoint
        self._listener = listener
        self._serve = serve
        self._counts = counts
        self._lock = threading.Lock()
        self._pipes: dict[KVPipe, threading.Thread] = {}
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                pipe = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    logger.warning("cannot accept a KV connection: %s", error)
                    time.sleep(0.1)  # out of descriptors, most likely: do not spin
                continue
            if len(self._pipes) < MAX_PIPES:
                self._start(pipe)
            else:
                self._counts["refused_connection"] += 1
                pipe.close()

    def _start(self, pipe: KVPipe) -> None:
        thread = threading.Thread(target=self._run, args=(pipe,), name="kv-sink", daemon=True)
        with self._lock:
            self._pipes[pipe] = thread
            if self._closing:
                pipe.interrupt()
            thread.start()

    def _run(self, pipe: KVPipe) -> None:
        try:
            self._serve(pipe)
        finally:
            with self._lock:
                del self._pipes[pipe]
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


# ---- how long a peer may keep a pipe's thread waiting ----


@contextmanager
def time_limit(pipe: KVPipe, seconds: float, peer: Blame) -> Iterator[None]:
    """Interrupts the pipe when the body takes longer in all, however its bytes trickle in.

    Raises:
        TransferError: CONNECT_FAILED, in place of the OSError of the pipe that was interrupted.
    """
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        pipe.interrupt()

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except OSError as error:
        if not late.is_set():
            raise
        message = f"the {peer} rank said no greeting within {seconds} s"
        raise TransferError(message, code="CONNECT_FAILED", blame=peer) from error
    finally:
        timer.cancel()
        timer.join()
