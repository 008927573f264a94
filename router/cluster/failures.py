"""The effects of each error code that a node, or a call to one, may end with.

One table, for the breaker, the choice of nodes, retries and the search for poison. A code that it
lacks has no effect but that of its blame: it counts against the node whose role it names.
"""

from __future__ import annotations

from enum import Flag, auto


class Effect(Flag):
    """The consequences of an error of this code, beside those of its blame."""

    NONE = 0
    DEATH = auto()  # the node has ended, or must: the request may be what kills it
    LOST = auto()  # the node gets no request until its next heartbeat
    LINK = auto()  # as a TransferError: caused by the link between two nodes, not by either
    SOUND = auto()  # the node can serve other requests
    POISON = auto()  # twice, on two nodes if there are two: the request would fail on any
    STANDSTILL = auto()  # explained if this router itself stood still


_ENDED = Effect.DEATH | Effect.LOST
EFFECTS: dict[str, Effect] = {
    # The node, or its engine, has ended.
    "PEER_LOST": _ENDED | Effect.LINK | Effect.STANDSTILL,
    "RANK_DIED": _ENDED,
    "RANK_LOST": _ENDED,
    "RANKS_DISAGREE": _ENDED,
    "STEP_MISSED": _ENDED,
    "STOPPED": _ENDED,
    "ENGINE_STALLED": _ENDED,
    "NODE_FAILED": Effect.DEATH,  # no better code: it may still live
    "SESSION_NOT_CLOSED": _ENDED,
    # It does not answer, or takes no more work.
    "PEER_SILENT": Effect.LOST | Effect.STANDSTILL,
    "UNREACHABLE": Effect.LOST | Effect.STANDSTILL,
    "DRAINING": Effect.LOST,
    "NODE_STOPPING": Effect.LOST,
    # It failed at one request.
    "SEQUENCE_FAILED": Effect.SOUND | Effect.POISON,
    "ADAPTER_NOT_LOADED": Effect.SOUND,
    "INTERNAL": Effect.POISON,
    "PROTOCOL_ERROR": Effect.NONE,
    "PEER_ERROR": Effect.NONE,
    "RPC_FAILED": Effect.NONE,
    "TOKEN_STREAM_LOST": Effect.STANDSTILL,
    "ORPHAN_GONE": Effect.NONE,
    "ROUTER_STOOD_STILL": Effect.NONE,
    "MESSAGE_TOO_SLOW": Effect.NONE,
    "CLUSTER_AUTH_FAILED": Effect.NONE,
    "CLOCK_SKEW": Effect.NONE,
    # A hand-off failed.
    "CONNECT_FAILED": Effect.LINK,
    "NO_COMMON_CONNECTOR": Effect.LINK,
    "LEASE_EXPIRED": Effect.LINK | Effect.STANDSTILL,
    "TRANSFER_FAILED": Effect.NONE,
    "CONNECTOR_FAILED": Effect.NONE,
    "TLS_MISMATCH": Effect.NONE,
    "LAYOUT_MISMATCH": Effect.NONE,
    "FINGERPRINT_MISMATCH": Effect.NONE,
    "DIGEST_MISMATCH": Effect.NONE,
    "EXPIRED": Effect.NONE,
    "ABORTED": Effect.NONE,
    "CANCELLED": Effect.NONE,
    "STALE_EPOCH": Effect.NONE,
    "UNKNOWN_TRANSFER": Effect.NONE,
    "ALREADY_LANDED": Effect.NONE,
    "BAD_FRAME": Effect.NONE,
    "BAD_COMMIT": Effect.NONE,
}


def has(code: str, effect: Effect) -> bool:
    return effect in EFFECTS.get(code, Effect.NONE)
