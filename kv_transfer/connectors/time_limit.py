"""How long a peer may keep a pipe's thread waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.core.errors import Blame, TransferError
from kv_transfer.pipe import KVPipe


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
