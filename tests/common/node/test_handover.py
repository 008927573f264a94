"""A node's part in a hand-over does not wait for the step that its ranks are at."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc

from live_node import decode_node, eventually
from pdserve.common.core.request import GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc.convert import job_to_pb
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.pb import inference_pb2

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
JOB = GenerateJob("here", tuple(range(3, 67)), PARAMS)  # four blocks


async def test_a_step_that_runs_holds_up_neither_reservation_nor_landing() -> None:
    """All of the second job's KV is in the prefix cache: it lands with the commit."""
    async with (
        decode_node() as (node, _, (gate,)),
        grpc.aio.insecure_channel(node.address) as channel,
        asyncio.timeout(60),
    ):
        stub, engine = pb_grpc.DecodeStub(channel), node.replicas[0].engine
        gate.let(1)  # the step that computes the prompt, and draws the first token
        running = stub.Run(pb.DecodeRequest(job=job_to_pb(JOB), local_prefill=True))
        while not (await running.read()).HasField("tokens"):
            pass
        step = engine.progress().step
        handed_over = stub.Run(pb.DecodeRequest(job=job_to_pb(replace(JOB, request_id="there"))))
        ticket = (await handed_over.read()).reserved
        assert ticket.first_block == 4
        token = pb.TokenEvent(tokens=[inference_pb2.Token(id=7)])
        commit = pb.CommitRequest(transfer_id=ticket.transfer_id, epoch=1, first_token=token)
        await pb_grpc.KVTransferStub(channel).Commit(commit)
        landed = (await handed_over.read()).landed
        assert landed.first_token.tokens[0].id == 7 and landed.cached_tokens == 64
        assert engine.progress().computing and engine.progress().step <= step + 1
        gate.let()
        for call, left in ((running, 39), (handed_over, 39)):
            tokens = 0
            while (event := await call.read()) is not grpc.aio.EOF:
                tokens += len(event.tokens.tokens)
            assert tokens == left
        pool = node.replicas[0].scheduler.pool
        await eventually(lambda: pool.num_free == pool.num_blocks)


async def test_a_client_that_leaves_as_its_kv_lands_leaves_no_block() -> None:
    async with (
        decode_node() as (node, _, _),
        grpc.aio.insecure_channel(node.address) as channel,
        asyncio.timeout(60),
    ):
        stub, pool = pb_grpc.DecodeStub(channel), node.replicas[0].scheduler.pool
        first = stub.Run(pb.DecodeRequest(job=job_to_pb(JOB), local_prefill=True))
        await first.read()
        for turn in range(20):
            call = stub.Run(pb.DecodeRequest(job=job_to_pb(replace(JOB, request_id=str(turn)))))
            ticket = (await call.read()).reserved
            token = pb.TokenEvent(tokens=[inference_pb2.Token(id=7)])
            request = pb.CommitRequest(transfer_id=ticket.transfer_id, epoch=1, first_token=token)
            commit = pb_grpc.KVTransferStub(channel).Commit(request)
            for _ in range(turn):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([asyncio.ensure_future(commit)])
        first.cancel()
        await eventually(lambda: pool.num_free == pool.num_blocks)
        await eventually(lambda: not node.replicas[0].sessions)
