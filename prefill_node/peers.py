"""Which decode nodes this prefill node reaches, by its own calls and, in doubt, by probes.

The router may well reach a decode node that this node does not; only this node can say so. One
decode node that died is not this node's ailment: it has one when of all that it knows none answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

# Seconds without use after which an address is forgotten.
FORGET_AFTER = 10.0  # out of reach: or this node would be sick, and hence unused, for ever
FORGET_REACHED_AFTER = 600.0
PROBE_PERIOD = 1.0  # seconds
PROBE_TIMEOUT = 1.0  # seconds


@dataclass(slots=True)
class _Peer:
    last_used: float
    doubted: bool = False  # a call was lost: a probe will tell
    lost: str = ""  # what the last probe told; empty: it was reached


class DecodePeers:
    """Addresses of decode nodes and whether somebody answers there."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._peers: dict[str, _Peer] = {}

    def used(self, address: str, answered: bool = True) -> None:
        """A call ended: with an answer, an error included, or without any."""
        lost = self._peers[address].lost if address in self._peers and not answered else ""
        self._peers[address] = _Peer(self._now(), not answered, lost)

    def probed(self, address: str, lost: str) -> None:
        """`lost` is why the network does not lead there; empty: it does."""
        if address in self._peers:
            self._peers[address].doubted, self._peers[address].lost = False, lost

    def in_doubt(self) -> list[str]:
        """Whom to probe: nobody while all answer; everybody once one does not."""
        self._forget()
        doubt = any(peer.doubted or peer.lost for peer in self._peers.values())
        return list(self._peers) if doubt else []

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
        now = self._now()
        self._peers = {
            address: peer
            for address, peer in self._peers.items()
            if now - peer.last_used < (FORGET_AFTER if peer.lost else FORGET_REACHED_AFTER)
        }


async def why_unreachable(address: str) -> str:
    """Why the network does not lead there; empty: it does. A refusal is an answer, too: the node
    died, which is not this node's ailment."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT} s"
    except OSError as error:
        return str(error)
    writer.close()
    return ""
