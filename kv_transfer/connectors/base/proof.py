"""The proof, by both ranks of a connection, that they know the cluster's key; it precedes HELLO.

source                              sink
CHALLENGE  a random number     ──▶
                               ◀──  CHALLENGE  another one
PROOF  the source's MAC        ──▶
                               ◀──  PROOF  the sink's MAC, by the key that the source has used
HELLO …

A MAC is HMAC-SHA256 over the side that speaks, both numbers and the endpoint that was dialled. The
numbers are new each time, so a proof cannot be replayed, used by the other side or used at another
sink. The sink tells a peer without a proof only that it needs one. Later frames carry no MAC: only
TLS protects against an attacker who changes packets on their way.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.core.printable import MAX_PEER_TEXT, printable
from pdserve.kv_transfer.connectors.base.handshake import recv_greeting, refused, send_frame
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.pipe import KVPipe

CODE = "CLUSTER_AUTH_FAILED"
NUMBER_NBYTES = 32
_LABEL = b"pdserve KV connection 1"
_SAME_KEY = "give all roles the same --cluster-key (PDSERVE_CLUSTER_KEY)"
_SOURCE, _SINK = b"source", b"sink"

Keys = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ProofExchange:
    """Holds the facts that a proof signs: those of one connection to one endpoint."""

    endpoint: bytes
    of_source: bytes
    of_sink: bytes

    def mac(self, key: bytes, side: bytes) -> bytes:
        """Signs the facts. The endpoint comes last because only its length varies."""
        facts = (_LABEL, side, self.of_source, self.of_sink, self.endpoint)
        return hmac.digest(key, b"\0".join(facts), "sha256")

    def key_of(self, proof: bytes, keys: Keys, side: bytes) -> bytes | None:
        """Returns the key that made the proof; None if none of `keys` did."""
        made = [key for key in keys if hmac.compare_digest(self.mac(key, side), proof)]
        return made[0] if made else None


def prove_source(pipe: KVPipe, keys: Keys, endpoint: bytes) -> ProofExchange:
    """Source: sends its proof; `check_sink` reads the sink's. Raises TransferError or OSError."""
    number = secrets.token_bytes(NUMBER_NBYTES)
    send_frame(pipe, Frame(FrameKind.CHALLENGE), number)
    exchange = ProofExchange(endpoint, number, _answer(pipe, FrameKind.CHALLENGE))
    send_frame(pipe, Frame(FrameKind.PROOF), exchange.mac(keys[0], _SOURCE))
    return exchange


def check_sink(pipe: KVPipe, keys: Keys, exchange: ProofExchange) -> None:
    """Source: raises TransferError when the sink does not know a key."""
    if exchange.key_of(_answer(pipe, FrameKind.PROOF), keys, _SINK) is None:
        raise _unproved("it answers with another cluster key")


def check_source(pipe: KVPipe, keys: Keys, endpoint: bytes) -> None:
    """Sink: raises TransferError after refusing a source that does not know a key."""
    theirs = _question(pipe, FrameKind.CHALLENGE)
    exchange = ProofExchange(endpoint, theirs, secrets.token_bytes(NUMBER_NBYTES))
    send_frame(pipe, Frame(FrameKind.CHALLENGE), exchange.of_sink)
    key = exchange.key_of(_question(pipe, FrameKind.PROOF), keys, _SOURCE)
    if key is None:
        error = refused(pipe, CODE, f"the prefill node has another cluster key: {_SAME_KEY}")
        with suppress(OSError, TransferError):
            recv_greeting(pipe, Blame.PREFILL)  # closing with its HELLO unread would drop REFUSED
        raise error
    send_frame(pipe, Frame(FrameKind.PROOF), exchange.mac(key, _SINK))


def refuse_challenge(pipe: KVPipe) -> TransferError:
    """Sink without a key: refuses a source that has one."""
    what = "the prefill node has a cluster key and the decode node has none"
    return refused(pipe, CODE, f"{what}: {_SAME_KEY}")


def _question(pipe: KVPipe, kind: FrameKind) -> bytes:
    frame, payload = recv_greeting(pipe, Blame.PREFILL)
    if frame.kind is FrameKind.HELLO:
        raise refused(pipe, CODE, f"the prefill node shows no cluster key: {_SAME_KEY}")
    return _checked(frame, payload, kind, Blame.PREFILL)


def _answer(pipe: KVPipe, kind: FrameKind) -> bytes:
    """Reads a sink's answer. The sink is not authenticated yet, so its refusal is retryable."""
    frame, payload = recv_greeting(pipe, Blame.DECODE)
    if frame.kind is FrameKind.REFUSED:
        said = payload.decode(errors="replace").removeprefix(f"{CODE}: ")
        raise _unproved(f"it refuses: {printable(said, MAX_PEER_TEXT)}")
    return _checked(frame, payload, kind, Blame.DECODE)


def _checked(frame: Frame, payload: bytes, kind: FrameKind, peer: Blame) -> bytes:
    if frame.kind is not kind or len(payload) != NUMBER_NBYTES:
        raise bad_frame(f"{frame.kind.name} of {len(payload)} bytes before {kind.name}", peer)
    return payload


def _unproved(what: str) -> TransferError:
    message = f"the KV port of the decode node does not know the cluster key ({what})"
    return TransferError(message, code=CODE, blame=Blame.DECODE, retryable=True)
