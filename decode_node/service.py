"""The decode node's half of the hand-off over gRPC: commits from prefill nodes."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.core.parameters import MAX_LOGPROBS
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.digest import digest_from_pb


class KVTransferService(pb_grpc.KVTransferServicer):
    def __init__(self, sinks: Sequence[KVSink], vocab_size: int) -> None:
        """`sinks` are the sinks of all replicas, behind one address."""
        self._sinks = sinks
        self._vocab_size = vocab_size

    def _sink(self, transfer_id: bytes) -> KVSink:
        """Returns the replica's sink that issued the transfer's ticket. If none did, returns some
        sink, which answers that the transfer is unknown."""
        return next((each for each in self._sinks if each.knows(transfer_id)), self._sinks[0])

    async def Commit(
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        async with serving(context, Blame.DECODE):
            sink = self._sink(request.transfer_id)
            if fault := self._fault_of(request.first_token.token):
                sink.abort(request.transfer_id, request.epoch, fault)
                raise _bad_commit(fault)
            digests = [digest_from_pb(each) for each in request.digests]
            nbytes = await sink.commit(
                request.transfer_id, request.epoch, request.first_token, digests
            )
        return pb.CommitResponse(bytes=nbytes)

    def _fault_of(self, event: pb.TokenEvent) -> str:
        """Returns the fault of a first token; empty: none."""
        if len(event.tokens) != 1:
            return "a commit carries exactly one token"
        (token,) = event.tokens
        if len(token.top_logprobs) > MAX_LOGPROBS:
            return f"a commit carries at most {MAX_LOGPROBS} logprobs"
        largest = max((token.id, *(each.token_id for each in token.top_logprobs)))
        if largest >= self._vocab_size:
            return f"token id {largest} is outside the vocabulary of {self._vocab_size}"
        return ""

    async def Renew(
        self, request: pb.RenewRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewResponse:
        async with serving(context, Blame.DECODE):
            sink = self._sink(request.transfer_id)
            progress = sink.renew(request.transfer_id, request.epoch, request.committed)
        return pb.RenewResponse(progress=progress)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        async with serving(context, Blame.DECODE):
            sink = self._sink(request.transfer_id)
            sink.abort(request.transfer_id, request.epoch, request.reason)
        return pb.AbortResponse()

    async def Retarget(
        self, request: pb.RetargetRequest, context: grpc.aio.ServicerContext
    ) -> pb.RetargetResponse:
        async with serving(context, Blame.DECODE):
            sink = self._sink(request.transfer_id)
            ticket = await sink.retarget(request.transfer_id, request.epoch)
        return pb.RetargetResponse(ticket=ticket.to_pb())


def _bad_commit(fault: str) -> TransferError:
    """Returns an error that blames the prefill node, so that another one is tried."""
    message = f"the prefill node's commit: {fault}"
    return TransferError(message, code="BAD_COMMIT", blame=Blame.PREFILL, retryable=True)
