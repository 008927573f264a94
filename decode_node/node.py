"""The decode node: it reserves blocks, which prefill nodes fill, and generates tokens. Here is also
the node of both roles: a decode node that computes prompts itself, in chunks between its steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc

from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.core.errors import Blame, InvalidRequest, PdserveError
from pdserve.common.core.request import is_plain_id
from pdserve.common.engine.messages import RankReady
from pdserve.common.node.engine_node import EngineNode
from pdserve.common.node.replica import Call
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving
from pdserve.decode_node.claims import Claims, serve_claim
from pdserve.decode_node.kept_jobs import KeptJobs
from pdserve.decode_node.router_streams import RouterStream, RouterStreams
from pdserve.decode_node.service import KVTransferService
from pdserve.decode_node.session import DecodeSession
from pdserve.kv_transfer.commands import decode_endpoints
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.ticket import RankEndpoint
from pdserve.kv_transfer.layout import Rect, fingerprint
from pdserve.kv_transfer.selection import TransferSetup, set_up


class DecodeNode(EngineNode[DecodeSession, KVSink]):
    role = pb.ROLE_DECODE
    blame = Blame.DECODE

    def __init__(self, config: WorkerNodeConfig) -> None:
        super().__init__(config)
        self.streams = RouterStreams()
        self.kept_jobs = KeptJobs(config.node.orphan_lease, self.close, self.spawn)
        self.claims = Claims(config.node.orphan_lease)

    def set_up_transfers(self) -> TransferSetup:
        key = self.credentials.key
        return set_up(self.config, self.facts.device, self.kv_identity, key, source=False)

    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> KVSink:
        """Makes a sink with tickets that name only the ranks of its replica."""
        return KVSink(
            [
                RankEndpoint(each.rank, Rect.of(each.caches[group]), endpoint, group)
                for each in ranks
                for group, endpoint in decode_endpoints(each.extension_info).items()
            ],
            fingerprint=self.transfer_setup.fingerprint,
            block_size=self.config.engine.cache.block_size,
            address=self.address,
            lease_s=self.config.transfer.kv_lease,
            digests=self.config.transfer.enable_kv_digests,
            call=call,
        )

    def add_services(self) -> None:
        sinks = [replica.transfers for replica in self.replicas]
        self.server.add("Decode", pb_grpc.add_DecodeServicer_to_server, DecodeService(self))
        self.server.add(
            "KVTransfer",
            pb_grpc.add_KVTransferServicer_to_server,
            KVTransferService(sinks, self.facts.spec.vocab_size),
        )

    def end_streams(self) -> None:
        self.streams.end()

    def finish_choice(self, request_id: str, choice: int) -> None:
        """Ends a choice that needs no more tokens."""
        for replica in self.replicas:
            for session in replica.sessions:
                if session.request_id == request_id:
                    self.spawn(session.finish(choice))


class BothNode(DecodeNode):
    """Serves both roles. It neither sends nor takes KV, so it has no connectors."""

    role = pb.ROLE_BOTH
    blame = Blame.BOTH

    def __init__(self, config: BothNodeConfig) -> None:
        super().__init__(
            WorkerNodeConfig(
                node=config.node,
                tls=config.tls,
                auth=config.auth,
                engine=config.engine,
                events=config.events,
                log=config.log,
                observability=config.observability,
            )
        )

    def set_up_transfers(self) -> TransferSetup:
        return TransferSetup(fingerprint(self.kv_identity))

    def add_services(self) -> None:
        self.server.add("Decode", pb_grpc.add_DecodeServicer_to_server, DecodeService(self))


class DecodeService(pb_grpc.DecodeServicer):
    """Takes jobs from routers."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node

    async def Run(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DecodeResponse:
        async with serving(context, self._node.blame):
            if not request.local_prefill and not self._node.transfer_setup.connectors:
                raise InvalidRequest("a node of both roles takes no KV: it computes its prompts")
            with self._node.streams.named(_stream_name(request)) as stream:
                await stream.until_open()
                await self._run(request, stream)
        return pb.DecodeResponse()

    async def _run(self, request: pb.DecodeRequest, stream: RouterStream) -> None:
        """Runs the job from start to end. Reports a failure on the stream of its other events."""
        jobs, number = self._node.kept_jobs, request.job_number
        if request.join:
            await jobs.join(request.job.orphan_key).serve(stream, number)
            return
        job = convert.job_from_pb(request.job)
        session = self._node.admit(job, lambda replica: DecodeSession(replica, job))
        if (kept := jobs.begin(job.orphan_key, session, request.local_prefill)) is not None:
            await kept.serve(stream, number)
            return
        try:
            with stream.job(number, session.fail) as writer:
                try:
                    await session.run(request.local_prefill, writer)
                except PdserveError as error:
                    writer.end(error)
        finally:
            self._node.close(session)

    async def Events(
        self, request: pb.EventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepEvents]:
        async with serving(context, self._node.blame):
            messages = self._node.streams.messages(_stream_name(request))
            async with aclosing(messages):
                async for message in messages:
                    yield message

    async def Claim(
        self, request: pb.ClaimRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ClaimResponse]:
        async with serving(context, self._node.blame):
            answers = serve_claim(self._node.claims, request)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer

    async def TellKept(
        self, request: pb.TellKeptRequest, context: grpc.aio.ServicerContext
    ) -> pb.TellKeptResponse:
        async with serving(context, self._node.blame):
            self._node.claims.tell_kept(request)
        return pb.TellKeptResponse()

    async def FinishChoice(
        self, request: pb.FinishChoiceRequest, context: grpc.aio.ServicerContext
    ) -> pb.FinishChoiceResponse:
        async with serving(context):
            self._node.finish_choice(request.request_id, request.choice)
        return pb.FinishChoiceResponse()


def _stream_name(request: pb.DecodeRequest | pb.EventsRequest) -> str:
    if not is_plain_id(request.stream):
        raise InvalidRequest("a router's stream needs a name", param="stream")
    return request.stream
