"""The prefill node's gRPC service: jobs from routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc

from pdserve.common.core.errors import Blame
from pdserve.common.core.request import GenerateJob, TokenEvent
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.prefill_node.session import PrefillSession


class SessionHost(Protocol):
    """The node, as its service sees it."""

    def open(
        self, job: GenerateJob, ticket: Ticket, known_token: TokenEvent | None
    ) -> PrefillSession:
        """A session for a router's job; raises Unavailable, NodeError, InvalidRequest."""

    def close(self, session: PrefillSession) -> None:
        """Ends a session in the background."""


class PrefillService(pb_grpc.PrefillServicer):
    def __init__(self, host: SessionHost) -> None:
        self._host = host

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with serving(context, Blame.PREFILL):
            job, ticket = convert.job_from_pb(request.job), Ticket.from_proto(request.ticket)
            known = request.HasField("first_token")
            token = convert.event_from_pb(request.first_token) if known else None
            session = self._host.open(job, ticket, token)
            try:
                async with aclosing(session.events()) as events:
                    async for event in events:
                        yield event
            finally:
                self._host.close(session)
