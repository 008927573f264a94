"""The prefill node's gRPC service: jobs from routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from common.rpc import convert
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.pb import cluster_pb2_grpc as pb_grpc
from common.rpc.status import serving
from kv_transfer.ticket import Ticket

if TYPE_CHECKING:
    from prefill_node.node import PrefillNode


class PrefillService(pb_grpc.PrefillServicer):
    def __init__(self, node: PrefillNode) -> None:
        self._node = node

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with serving(context):
            job, ticket = convert.job_from_pb(request.job), Ticket.from_proto(request.ticket)
            session = self._node.open(job, ticket)
            try:
                async with aclosing(session.events()) as events:
                    async for event in events:
                        yield event
            finally:
                self._node.close(session)
