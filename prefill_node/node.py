"""The prefill node: prompts in; first tokens to the router, KV blocks to decode nodes."""

from __future__ import annotations

from typing import Any

import grpc

from common.core.errors import Blame
from common.core.request import GenerateJob
from common.engine.node import EngineNode
from common.engine.worker import ExtensionConfig
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.pb import cluster_pb2_grpc as pb_grpc
from common.rpc.status import from_rpc_error
from kv_transfer.layout import Rect, fingerprint
from kv_transfer.rank import FACTORY, rank_config
from kv_transfer.source import KVSource
from kv_transfer.ticket import Ticket
from prefill_node.service import PrefillService
from prefill_node.session import PrefillSession


class PrefillNode(EngineNode[PrefillSession]):
    role = pb.ROLE_PREFILL
    blame = Blame.PREFILL
    source: KVSource

    def fingerprint(self) -> str:
        return fingerprint(self.kv_identity())

    def extension(self) -> ExtensionConfig:
        config = rank_config(self.config.transfer, self.fingerprint(), source=True)
        return ExtensionConfig(FACTORY, config)

    def add_services(self) -> None:
        executor, caches = self.ranks.executor, [rank.cache for rank in self.ranks.ready]
        self.source = KVSource(
            [Rect(c.layer_start, c.layer_end, c.head_start, c.head_end) for c in caches],
            fingerprint=self.fingerprint(),
            connector=self.config.transfer.kv_connector,
            block_size=self.config.engine.cache.block_size,
            lease_s=self.config.transfer.kv_lease,
            call=executor.call,
            sink=DecodePeer(self.server.channels.get),
        )
        executor.on_event(self.source.on_event)
        self.server.add("Prefill", pb_grpc.add_PrefillServicer_to_server, PrefillService(self))

    async def close_transfers(self) -> None:
        await self.source.close()

    def open(self, job: GenerateJob, ticket: Ticket) -> PrefillSession:
        """A session for a router's job; the caller closes it with `close`."""
        return self.admit(job, lambda: PrefillSession(self, job, ticket))


class DecodePeer:
    """The decode node behind a ticket, over gRPC. Failures are typed errors."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def commit(self, ticket: Ticket, first_token: Any) -> int:
        """Returns the bytes that landed, once the sequence is runnable there."""
        request = pb.CommitRequest(
            transfer_id=ticket.transfer_id, epoch=ticket.epoch, first_token=first_token
        )
        response = await self._call("Commit", ticket, request)
        nbytes: int = response.bytes
        return nbytes

    async def renew(self, ticket: Ticket) -> None:
        await self._call(
            "Renew", ticket, pb.RenewRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch)
        )

    async def abort(self, ticket: Ticket, reason: str) -> None:
        request = pb.AbortRequest(transfer_id=ticket.transfer_id, epoch=ticket.epoch, reason=reason)
        await self._call("Abort", ticket, request)

    async def _call(self, method: str, ticket: Ticket, request: Any) -> Any:
        stub = pb_grpc.KVTransferStub(self._channel(ticket.address))
        try:
            return await getattr(stub, method)(request, timeout=ticket.lease_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Blame.DECODE) from None
