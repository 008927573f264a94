"""A source's calls to decode nodes, and the record of which decode nodes it can reach, kept by
those calls and by probes.

The router may reach a decode node that this node cannot, and only this node knows that. One dead
decode node does not make this node unhealthy; it is unhealthy when no decode node it knows answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import from_rpc_error
from pdserve.common.rpc.trace import trace_metadata
from pdserve.kv_transfer.connector import RunDigest
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import digest_to_pb

CALL_TIMEOUT = 30.0  # seconds, for tickets with a longer lease


class SinkClient:
    """Calls the sink of a ticket over gRPC. Calls raise TransferError when the sink refuses,
    another PdserveError when it is unreachable."""

    def __init__(self, channel: Callable[[str], Any], peers: DecodePeers) -> None:
        """`channel` returns the channel to an address."""
        self._channel = channel
        self._peers = peers

    def connect(self, ticket: Ticket) -> None:
        """Connects before the first call, because connecting takes longer than a call."""
        with self._peers.calling(ticket.address):
            self._channel(ticket.address).get_state(True)

    async def commit(
        self, ticket: Ticket, first_token: pb.FirstToken, digests: Sequence[RunDigest]
    ) -> int:
        """Returns the bytes that landed, once the sequence is runnable there. It has no deadline:
        it lasts as long as the transfer makes progress."""
        request = pb.CommitRequest(
            transfer_id=ticket.transfer_id,
            epoch=ticket.epoch,
            first_token=first_token,
            digests=[digest_to_pb(each) for each in digests],
        )
        response = await self._call("Commit", ticket, request, timeout=None)
        nbytes: int = response.bytes
        return nbytes

    async def renew(self, ticket: Ticket, committed: bool = False) -> int:
        """Renews the sink's lease unless `committed`. Returns a number that grows while the sink
        works on the transfer."""
        request = pb.RenewRequest(
            transfer_id=ticket.transfer_id, epoch=ticket.epoch, committed=committed
        )
        response = await self._call("Renew", ticket, request, _timeout(ticket))
        progress: int = response.progress
        return progress

    async def abort(self, ticket: Ticket, reason: str) -> None:
        request = pb.AbortRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch, reason=reason)
        await self._call("Abort", ticket, request, _timeout(ticket))

    async def retarget(self, ticket: Ticket) -> Ticket:
        """Returns the ticket of a new epoch, which replaces this one."""
        request = pb.RetargetRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch)
        response = await self._call("Retarget", ticket, request, _timeout(ticket))
        return Ticket.from_pb(response.ticket)

    async def _call(self, method: str, ticket: Ticket, request: Any, timeout: float | None) -> Any:
        with self._peers.calling(ticket.address):
            stub = pb_grpc.KVTransferStub(self._channel(ticket.address))
            try:
                call = getattr(stub, method)
                response = await call(request, timeout=timeout, metadata=trace_metadata())
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, Blame.DECODE)
                lost = failure.code == "PEER_LOST"
                self._peers.used(ticket.address, answered=not lost)
                raise (_unreachable(failure) if lost else failure) from None
            self._peers.used(ticket.address)
            return response


def _timeout(ticket: Ticket) -> float:
    """Returns the seconds for a call that needs no work."""
    return min(ticket.lease_s, CALL_TIMEOUT)


def _unreachable(failure: PdserveError) -> NodeError:
    """Blames the network: only the router, which calls the decode node itself, can blame that."""
    message = f"the prefill node cannot reach the decode node: {failure.message}"
    return NodeError(message, code=failure.code, blame=Blame.NETWORK)


# ---- which decode nodes are reachable ----

# Seconds without use after which an address is forgotten.
FORGET_AFTER = 10.0  # unreachable: otherwise this node would stay unhealthy, so unused, forever
FORGET_REACHED_AFTER = 600.0
CHANNEL_IDLE = 60.0  # seconds without a call after which a channel is closed
MAX_CHANNELS = 128  # kept open although no call is under way
MAX_PEERS = 1024  # remembered, the last used ones
PROBE_PERIOD = 1.0  # seconds
PROBE_TIMEOUT = 1.0  # seconds


@dataclass(slots=True)
class _Peer:
    last_used: float
    doubted: bool = False  # a call was lost and no probe has run since
    lost: str = ""  # why the last probe failed; empty: it succeeded


class DecodePeers:
    """Records which addresses of decode nodes answer."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._peers: dict[str, _Peer] = {}  # the last used ones come last
        self._calls: Counter[str] = Counter()  # under way
        self._channels: dict[str, float] = {}  # when the last call began or ended, in that order

    @contextmanager
    def calling(self, address: str) -> Iterator[None]:
        """Keeps the channel to an address open during a call."""
        self._calls[address] += 1
        try:
            yield
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]
            self._channels.pop(address, None)
            self._channels[address] = self._now()

    def take_unused(self) -> Sequence[str]:
        """Returns the addresses of unused channels to close, and forgets these channels."""
        idle = [address for address in self._channels if address not in self._calls]
        since = self._now() - CHANNEL_IDLE
        surplus = set(idle[: max(0, len(idle) - MAX_CHANNELS)])
        unused = [each for each in idle if each in surplus or self._channels[each] <= since]
        for address in unused:
            del self._channels[address]
        return unused

    def used(self, address: str, answered: bool = True) -> None:
        """Notes the end of a call, with an answer (an error is one) or without."""
        lost = self._peers[address].lost if address in self._peers and not answered else ""
        self._peers.pop(address, None)
        self._peers[address] = _Peer(self._now(), not answered, lost)
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def probed(self, address: str, lost: str) -> None:
        """Notes the result of a probe: why the address is unreachable; empty: it is reachable."""
        if address in self._peers:
            self._peers[address].doubted, self._peers[address].lost = False, lost

    def in_doubt(self) -> list[str]:
        """Returns the addresses to probe: none while all answer, all once one does not."""
        self._forget()
        doubt = any(peer.doubted or peer.lost for peer in self._peers.values())
        return list(self._peers) if doubt else []

    def unhealthy_reason(self) -> str:
        """Says that no decode node answers, and why; empty if one does or none is known. The router
        sends an unhealthy node no work, so the reason expires without any."""
        self._forget()
        lost = [f"{address} ({peer.lost})" for address, peer in self._peers.items() if peer.lost]
        if not lost or len(lost) < len(self._peers):
            return ""
        return f"no decode node reachable: {', '.join(lost)}"

    async def watch(
        self,
        probe: Callable[[str], Awaitable[str]],
        drop: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """Runs until cancelled. `probe(address)` returns why it is unreachable, or ""; `drop`
        closes the channels to addresses."""
        while True:
            await drop(self.take_unused())
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
    """Returns why the network does not reach an address; empty if it does. A refused connection
    counts as reached: the node died, and this node is healthy."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT} s"
    except (OSError, OverflowError, ValueError) as error:  # an unknown or malformed name
        return str(error)
    writer.close()
    return ""
