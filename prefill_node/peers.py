"""Which decode nodes this prefill node reaches, by its own calls and, in doubt, by probes.

The router may well reach a decode node that this node does not; only this node can say so. One
decode node that died is not this node's ailment: it has one when of all that it knows none answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

FORGET_AFTER = 10.0  # seconds without use after which an address out of reach is forgotten
PROBE_PERIOD = 1.0  # seconds
PROBE_TIMEOUT = 1.0  # seconds


@dataclass(slots=True)
class _Peer:
    last_used: float
    lost: str  # why nobody answered last; empty: somebody did


class DecodePeers:
    """Addresses of decode nodes and whether somebody answers there."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._peers: dict[str, _Peer] = {}

    def used(self, address: str, lost: str = "") -> None:
        """A call ended: with an answer, an error included, or `lost`, why nobody answered."""
        self._peers[address] = _Peer(self._now(), lost)

    def probed(self, address: str, lost: str) -> None:
        """As `used`, but it keeps no address from being forgotten."""
        if address in self._peers:
            self._peers[address].lost = lost

    def in_doubt(self) -> list[str]:
        """Whom to probe: nobody while all answer; everybody once one does not."""
        self._forget()
        return list(self._peers) if any(peer.lost for peer in self._peers.values()) else []

    def ailment(self) -> str:
        """That no decode node answers, and why; empty: one does, or none is known. Nobody sends
        work to a node that says so, so this must pass without any."""
        self._forget()
        lost = [f"{address} ({peer.lost})" for address, peer in self._peers.items() if peer.lost]
        if not lost or len(lost) < len(self._peers):
            return ""
        return f"no decode node reachable: {', '.join(lost)}"

    async def watch(self, probe: Callable[[str], Awaitable[str]]) -> None:
        """Runs until cancelled; `probe(address)` returns why nobody answers, or nothing."""
        while True:
            addresses = self.in_doubt()
            findings = await asyncio.gather(*map(probe, addresses))
            for address, lost in zip(addresses, findings, strict=True):
                self.probed(address, lost)
            await asyncio.sleep(PROBE_PERIOD)

    def _forget(self) -> None:
        limit = self._now() - FORGET_AFTER
        self._peers = {
            address: peer
            for address, peer in self._peers.items()
            if not peer.lost or peer.last_used > limit
        }


async def why_unreachable(channel: grpc.aio.Channel) -> str:
    """Asks the standard health service; whatever it says, somebody is there. Empty: so it is."""
    request = health_pb2.HealthCheckRequest()
    try:
        await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        return error.details() or error.code().name
    return ""
