"""The prefill node: prompts in; first tokens to the router, KV blocks to decode nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.core.request import GenerateJob, TokenEvent
from pdserve.common.engine.messages import RankReady
from pdserve.common.node.node import EngineNode
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import from_rpc_error
from pdserve.common.worker.kv_cache import cache_bytes, resized
from pdserve.kv_transfer.commands import Call
from pdserve.kv_transfer.control.source import KVSource
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import Rect
from pdserve.prefill_node.peers import DecodePeers, why_unreachable
from pdserve.prefill_node.service import PrefillService
from pdserve.prefill_node.session import PrefillSession

CALL_TIMEOUT = 30.0  # seconds, whatever lease a ticket may promise


class PrefillNode(EngineNode[PrefillSession, KVSource]):
    role = pb.ROLE_PREFILL
    blame = Blame.PREFILL

    def __init__(self, config: WorkerNodeConfig) -> None:
        super().__init__(config)
        self.peers = DecodePeers()

    def unhealthy_reason(self) -> str:
        return super().unhealthy_reason() or self.peers.unhealthy_reason()

    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> KVSource:
        caches = [rank.cache for rank in ranks]
        return KVSource(
            [Rect(c.layer_start, c.layer_end, c.head_start, c.head_end) for c in caches],
            fingerprint=self.fingerprint,
            block_size=self.config.engine.cache.block_size,
            lease_s=self.config.transfer.kv_lease,
            call=call,
            sink=DecodePeer(self.server.channels.get, self.peers),
            block_nbytes=max(cache_bytes(resized(each, 1)) for each in caches),
        )

    def add_services(self) -> None:
        self.spawn(self.peers.watch(why_unreachable, self.server.channels.drop))
        self.server.add("Prefill", pb_grpc.add_PrefillServicer_to_server, PrefillService(self))

    def open(
        self, job: GenerateJob, ticket: Ticket, known_token: TokenEvent | None
    ) -> PrefillSession:
        """A session for a router's job; the caller closes it with `close`."""
        return self.admit(
            job, lambda replica: PrefillSession(replica, self.metrics, job, ticket, known_token)
        )


class DecodePeer:
    """The decode node behind a ticket, over gRPC. Failures are typed errors."""

    def __init__(self, channel: Any, peers: DecodePeers) -> None:
        self._channel = channel
        self._peers = peers

    async def commit(self, ticket: Ticket, first_token: Any, digests: Sequence[RunDigest]) -> int:
        """Returns the bytes that landed, once the sequence is runnable there. Has no deadline of
        its own: it lasts as long as the transfer makes progress."""
        request = pb.CommitRequest(
            transfer_id=ticket.transfer_id,
            epoch=ticket.epoch,
            first_token=first_token,
            digests=[digest.to_proto() for digest in digests],
        )
        response = await self._call("Commit", ticket, request, timeout=None)
        nbytes: int = response.bytes
        return nbytes

    async def renew(self, ticket: Ticket) -> None:
        request = pb.RenewRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch)
        await self._call("Renew", ticket, request, _patience(ticket))

    async def progress(self, ticket: Ticket) -> int:
        request = pb.RenewRequest(
            transfer_id=ticket.transfer_id, epoch=ticket.epoch, committed=True
        )
        response = await self._call("Renew", ticket, request, _patience(ticket))
        progress: int = response.progress
        return progress

    async def abort(self, ticket: Ticket, reason: str) -> None:
        request = pb.AbortRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch, reason=reason)
        await self._call("Abort", ticket, request, _patience(ticket))

    async def retarget(self, ticket: Ticket) -> Ticket:
        """The ticket of a new epoch, in place of this one."""
        request = pb.RetargetRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch)
        response = await self._call("Retarget", ticket, request, _patience(ticket))
        return Ticket.from_proto(response.ticket)

    async def _call(self, method: str, ticket: Ticket, request: Any, timeout: float | None) -> Any:
        with self._peers.calling(ticket.address):
            stub = pb_grpc.KVTransferStub(self._channel(ticket.address))
            try:
                response = await getattr(stub, method)(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, Blame.DECODE)
                lost = failure.code == "PEER_LOST"
                self._peers.used(ticket.address, answered=not lost)
                raise (_out_of_reach(failure) if lost else failure) from None
            self._peers.used(ticket.address)
            return response


def _patience(ticket: Ticket) -> float:
    """Seconds for an answer that needs no work."""
    return min(ticket.lease_s, CALL_TIMEOUT)


def _out_of_reach(failure: PdserveError) -> NodeError:
    """From here: whether the decode node is to blame, the router knows, which calls it itself."""
    message = f"the prefill node cannot reach the decode node: {failure.message}"
    return NodeError(message, code=failure.code, blame=Blame.NETWORK)
