"""The first frames of a connection, by which a sink admits or refuses a source. Neither side waits
longer than `GREETING_S` for the other's greeting as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.core.printable import MAX_PEER_TEXT, peer_code, printable
from pdserve.kv_transfer.frame import HEADER_NBYTES, MAX_GREETING, Frame, FrameKind, bad_frame
from pdserve.kv_transfer.pipe import KVPipe

# As long as any other frame may take. A sink bounds strangers by their number, and a source's
# transfer ends with its lease: a shorter time would only part peers on busy hosts.
GREETING_S = 30.0
MAX_FINGERPRINT = 200  # characters of a peer's fingerprint that are logged


def send_frame(pipe: KVPipe, frame: Frame, payload: bytes = b"") -> None:
    pipe.send_bytes(replace(frame, nbytes=len(payload)).encode())
    if payload:
        pipe.send_bytes(payload)


def recv_frame(pipe: KVPipe) -> Frame:
    return Frame.decode(pipe.recv_bytes(HEADER_NBYTES))


def recv_greeting(pipe: KVPipe, blame: Blame) -> tuple[Frame, bytes]:
    """Receives one of the first frames of a connection, with its (small) payload. Raises
    TransferError BAD_FRAME."""
    frame = recv_frame(pipe)
    if frame.nbytes > MAX_GREETING:
        raise bad_frame(f"a greeting of {frame.nbytes} bytes", blame)
    return frame, pipe.recv_bytes(frame.nbytes) if frame.nbytes else b""


def expect_welcome(pipe: KVPipe) -> None:
    """Source: raises TransferError when the sink refused this rank."""
    frame, payload = recv_greeting(pipe, Blame.DECODE)
    if frame.kind is not FrameKind.WELCOME:
        code, _, message = payload.decode(errors="replace").partition(": ")
        raise _refusal(peer_code(code), printable(message, MAX_PEER_TEXT))


def check_fingerprint(pipe: KVPipe, ours: str, theirs: str) -> None:
    """Sink: raises TransferError after refusing another fingerprint."""
    if theirs != ours:
        code, why = "FINGERPRINT_MISMATCH", "the nodes serve different models or layouts"
        said = printable(theirs, MAX_FINGERPRINT)
        # The source may be a stranger: it learns only that its fingerprint is wrong, not ours.
        told = f"fingerprint {said} is not the decode rank's: {why} (/v1/cluster shows the parts)"
        raise refused(pipe, code, told, f"fingerprint {said} ≠ {ours}: {why}")


def refused(pipe: KVPipe, code: str, told: str, known: str = "") -> TransferError:
    """Sink: tells the source why it is refused; returns the error for this end, with the message
    `known` if there is one."""
    send_frame(pipe, Frame(FrameKind.REFUSED), f"{code}: {told}".encode())
    return _refusal(code, known or told)


def _refusal(code: str, message: str) -> TransferError:
    return TransferError(message, code=code, blame=Blame.PREFILL, retryable=False)


@contextmanager
def greeting_limit(pipe: KVPipe, peer: Blame) -> Iterator[None]:
    """Interrupts the pipe when the body takes longer than GREETING_S as a whole, even if bytes
    trickle in.

    Raises:
        TransferError: CONNECT_FAILED, instead of the interrupted pipe's OSError.
    """
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        pipe.interrupt()

    timer = threading.Timer(GREETING_S, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except OSError as error:
        if not late.is_set():
            raise
        message = f"the {peer} rank sent no greeting within {GREETING_S:g} s"
        raise TransferError(message, code="CONNECT_FAILED", blame=peer) from error
    finally:
        timer.cancel()
        timer.join()
