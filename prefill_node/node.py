"""The prefill node: it computes prompts and sends first tokens to the router, KV to decode
nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc

from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.errors import Blame
from pdserve.common.engine.messages import RankReady
from pdserve.common.node.engine_node import EngineNode
from pdserve.common.node.replica import Call
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving
from pdserve.common.worker.kv_cache import cache_bytes, resized
from pdserve.kv_transfer.control.sink_client import DecodePeers, SinkClient, why_unreachable
from pdserve.kv_transfer.control.source import KVSource
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.layout import Rect, Share
from pdserve.kv_transfer.selection import TransferSetup, set_up
from pdserve.prefill_node.session import PrefillSession


class PrefillNode(EngineNode[PrefillSession, KVSource]):
    role = pb.ROLE_PREFILL
    blame = Blame.PREFILL

    def __init__(self, config: WorkerNodeConfig) -> None:
        # It draws one token of each sequence, so speculation and captured steps are of no use.
        engine = config.engine
        eager = replace(engine.compilation, enforce_eager=True)
        engine = replace(engine, speculation=SpeculationOptions(), compilation=eager)
        super().__init__(replace(config, engine=engine))
        self.peers = DecodePeers()

    def unhealthy_reason(self) -> str:
        return super().unhealthy_reason() or self.peers.unhealthy_reason()

    def set_up_transfers(self) -> TransferSetup:
        key = self.credentials.key
        return set_up(self.config, self.facts.device, self.kv_identity, key, source=True)

    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> KVSource:
        caches = [(each.rank, *part) for each in ranks for part in enumerate(each.caches)]
        shares = [Share(rank, Rect.of(cache), group) for rank, group, cache in caches]
        return KVSource(
            [share for share in shares if share.rect.area],
            fingerprint=self.transfer_setup.fingerprint,
            block_size=self.config.engine.cache.block_size,
            lease_s=self.config.transfer.kv_lease,
            call=call,
            sink=SinkClient(self.server.channels.get, self.peers),
            block_nbytes=max(cache_bytes(resized(cache, 1)) for _, _, cache in caches),
        )

    def add_services(self) -> None:
        self.spawn(self.peers.watch(why_unreachable, self.server.channels.drop))
        self.server.add("Prefill", pb_grpc.add_PrefillServicer_to_server, PrefillService(self))


class PrefillService(pb_grpc.PrefillServicer):
    """Takes jobs from routers."""

    def __init__(self, node: PrefillNode) -> None:
        self._node = node

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with serving(context, Blame.PREFILL):
            job, ticket = convert.job_from_pb(request.job), Ticket.from_pb(request.ticket)
            known = request.HasField("first_token")
            token = convert.event_from_pb(request.first_token) if known else None
            session = self._node.admit(
                job, lambda replica: PrefillSession(replica, job, ticket, token)
            )
            try:
                async with aclosing(session.events()) as events:
                    async for event in events:
                        yield event
            finally:
                self._node.close(session)
