"""A source's calls to the decode nodes behind its tickets, and which of these nodes it reaches: by
those calls and, in doubt, by probes.

The router may well reach a decode node that this node does not; only this node can say so. That one
decode node died does not make this node unhealthy: it is when of all that it knows none answers.
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
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest

CALL_TIMEOUT = 30.0  # seconds, whatever lease a ticket may promise


class SinkClient:
    """The sink behind a ticket, over gRPC. Calls raise PdserveError: TransferError when the sink
    refuses, others when it is out of reach."""

    def __init__(self, channel: Callable[[str], Any], peers: DecodePeers) -> None:
        """`channel` returns the channel to an address."""
        self._channel = channel
        self._peers = peers

    def connect(self, ticket: Ticket) -> None:
        """Ahead of the first call: a connection takes longer than a call."""
        with self._peers.calling(ticket.address):
            self._channel(ticket.address).get_state(True)

    async def commit(
        self, ticket: Ticket, first_token: pb.FirstToken, digests: Sequence[RunDigest]
    ) -> int:
        """Returns the bytes that landed, once the sequence is runnable there. Has no deadline of
        its own: it lasts as long as the transfer makes progress."""
        request = pb.CommitRequest(
            transfer_id=ticket.transfer_id,
            epoch=ticket.epoch,
            first_token=first_token,
            digests=[digest.to_pb() for digest in digests],
        )
        response = await self._call("Commit", ticket, request, timeout=None)
        nbytes: int = response.bytes
        return nbytes

    async def renew(self, ticket: Ticket) -> None:
        request = pb.RenewRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch)
        await self._call("Renew", ticket, request, _timeout(ticket))

    async def progress(self, ticket: Ticket) -> int:
        """Grows as the sink gets on with what was committed."""
        request = pb.RenewRequest(
            transfer_id=ticket.transfer_id, epoch=ticket.epoch, committed=True
        )
        response = await self._call("Renew", ticket, request, _timeout(ticket))
        progress: int = response.progress
        return progress

    async def abort(self, ticket: Ticket, reason: str) -> None:
        request = pb.AbortRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch, reason=reason)
        await self._call("Abort", ticket, request, _timeout(ticket))

    async def retarget(self, ticket: Ticket) -> Ticket:
        """The ticket of a new epoch, in place of this one."""
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
    """Seconds for an answer that needs no work."""
    return min(ticket.lease_s, CALL_TIMEOUT)


def _unreachable(failure: PdserveError) -> NodeError:
    """From here: whether the decode node is to blame, the router knows, which calls it itself."""
    message = f"the prefill node cannot reach the decode node: {failure.message}"
    return NodeError(message, code=failure.code, blame=Blame.NETWORK)


# ---- which decode nodes are reached ----

# Seconds without use after which an address is forgotten.
FORGET_AFTER = 10.0  # out of reach: or this node would be unhealthy, and hence unused, for ever
FORGET_REACHED_AFTER = 600.0
CHANNEL_IDLE = 60.0  # seconds without a call after which a channel is closed
MAX_CHANNELS = 128  # kept open although no call is under way
MAX_PEERS = 1024  # remembered; those used last
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
        self._peers: dict[str, _Peer] = {}  # those used last come last
        self._calls: Counter[str] = Counter()  # under way
        self._channels: dict[str, float] = {}  # when the last call began or ended, in that order

    @contextmanager
    def calling(self, address: str) -> Iterator[None]:
        """Its channel stays open meanwhile."""
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
        """Whose channels shall be closed: they cost, and decode nodes come and go."""
        idle = [address for address in self._channels if address not in self._calls]
        since = self._now() - CHANNEL_IDLE
        surplus = set(idle[: max(0, len(idle) - MAX_CHANNELS)])
        unused = [each for each in idle if each in surplus or self._channels[each] <= since]
        for address in unused:
            del self._channels[address]
        return unused

    def used(self, address: str, answered: bool = True) -> None:
        """A call ended: with an answer, an error included, or without any."""
        lost = self._peers[address].lost if address in self._peers and not answered else ""
        self._peers.pop(address, None)
        self._peers[address] = _Peer(self._now(), not answered, lost)
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def probed(self, address: str, lost: str) -> None:
        """`lost` is why the network does not lead there; empty: it does."""
        if address in self._peers:
            self._peers[address].doubted, self._peers[address].lost = False, lost

    def in_doubt(self) -> list[str]:
        """Whom to probe: nobody while all answer; everybody once one does not."""
        self._forget()
        doubt = any(peer.doubted or peer.lost for peer in self._peers.values())
        return list(self._peers) if doubt else []

    def unhealthy_reason(self) -> str:
        """That no decode node answers, and why; empty: one does, or none is known. Nobody sends
        work to a node that says so, so this must pass without any."""
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
        """Runs until cancelled; `probe(address)` returns why nobody answers, or nothing; `drop`
        closes the channels to some addresses."""
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
    """Why the network does not lead there; empty: it does. A refusal is an answer, too: the node
    died, which is not this node's fault."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT} s"
    except (OSError, OverflowError, ValueError) as error:  # no such name, or none that can be
        return str(error)
    writer.close()
    return ""
