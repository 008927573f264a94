"""What a source rank has lent, to whom, and what came back.

    lend ──▶ open loan ──take_back──▶ nothing is said        the transfer's own hold covers it
               │ close, on_loan names what is left
               ▼
             named ──take_back, lost──▶ Returned             the core holds the blocks until then

A loan is a transfer's epoch. It is recorded before the sink hears of the blocks, and ends when the
sink says so, or has no descriptor of this rank's memory any more (`Line`): so no block is free
that somebody may read, whatever message is lost.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from pdserve.kv_transfer.connector import Event, Returned

Loan = tuple[bytes, int]  # transfer id, epoch

_RETURN = struct.Struct("!16sI")  # of one loan; little-endian block ids follow
MAX_IDS = 4096  # in a message


class Ledger:
    """Thread-safe; events are emitted outside the lock. `line` is whatever names a sink."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._open: dict[bytes, int] = {}  # transfers that may lend → epoch
        self._loans: dict[tuple[Loan, object], set[int]] = {}
        self._named: set[tuple[Loan, object]] = set()

    def open(self, loan: Loan) -> None:
        """From now on, until `close`, it may be lent to."""
        with self._lock:
            self._open[loan[0]] = loan[1]

    def lend(self, loan: Loan, line: object, blocks: Sequence[int]) -> bool:
        """Whether the sink behind `line` may read the blocks in place; they are lent then."""
        with self._lock:
            if self._open.get(loan[0]) != loan[1]:
                return False
            self._loans.setdefault((loan, line), set()).update(blocks)
            return True

    def take_back(self, loan: Loan, line: object, blocks: Sequence[int]) -> None:
        """The sink reads these no more, or never did. What it does not have is ignored."""
        with self._lock:
            back, named = self._pop((loan, line), set(blocks))
        if named and back:
            self._emit(Returned(*loan, tuple(sorted(back))))

    def lost(self, line: object) -> None:
        """The sink has this rank's memory no more, and so none of its blocks."""
        with self._lock:
            keys = [key for key in self._loans if key[1] is line]
            ended = [(key[0], *self._pop(key, self._loans[key])) for key in keys]
        for loan, back, named in ended:
            if named:
                self._emit(Returned(*loan, tuple(sorted(back))))

    def _pop(self, key: tuple[Loan, object], blocks: set[int]) -> tuple[set[int], bool]:
        lent, named = self._loans.get(key, set()), key in self._named
        back = lent & blocks
        lent -= back
        if not lent:
            self._loans.pop(key, None)
            self._named.discard(key)
        return back, named

    def close(self, transfer_id: bytes) -> None:
        """Nothing more is lent for it."""
        with self._lock:
            self._open.pop(transfer_id, None)

    def on_loan(self, transfer_id: bytes) -> tuple[int, ...]:
        """As `LendingConnector.on_loan`."""
        named: Counter[int] = Counter()
        with self._lock:
            for key, blocks in self._loans.items():
                if key[0][0] == transfer_id and key not in self._named:
                    self._named.add(key)
                    named.update(blocks)
        return tuple(named.elements())


class Line:
    """A socket pair whose other end a sink holds as long as it has this rank's memory; on it the
    sink says what it gives back. The kernel closes it when the sink's process ends."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._run, name="kv-loans", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """The peer has `theirs`, or will never have it."""
        self.theirs.close()
        self._thread.start()

    def _run(self) -> None:
        try:
            while message := self._sock.recv(_RETURN.size + 4 * MAX_IDS):
                loan, blocks = decode_return(message)
                self._ledger.take_back(loan, self, blocks)
        except (OSError, ValueError):  # gone, or it talks nonsense: its blocks are its own concern
            pass
        finally:
            self._ledger.lost(self)
            self._sock.close()

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def encode_return(loan: Loan, blocks: Sequence[int]) -> list[bytes]:
    """Messages of at most `MAX_IDS` blocks each."""
    ids = np.asarray(blocks, "<u4")
    parts = (ids[start : start + MAX_IDS] for start in range(0, len(ids), MAX_IDS))
    return [_RETURN.pack(*loan) + part.tobytes() for part in parts]


def decode_return(message: bytes) -> tuple[Loan, list[int]]:
    """Raises ValueError on what is none."""
    head, ids = message[: _RETURN.size], message[_RETURN.size :]
    if len(head) < _RETURN.size or len(ids) % 4:
        raise ValueError(f"a message of {len(message)} bytes")
    transfer_id, epoch = _RETURN.unpack(head)
    blocks: list[int] = np.frombuffer(ids, "<u4").tolist()
    return (transfer_id, epoch), blocks
