"""A stop string ends a choice in the router; its decode node computes no more of it, and all of
the others."""

from __future__ import annotations

from dataclasses import replace

import grpc

from live_node import decode_node, eventually, run_job
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.tokens import JobTokens

PARAMS = SamplingParams(max_tokens=200, ignore_eos=True, seed=3)
JOB = GenerateJob("three", tuple(range(3, 40)), PARAMS, (Choice(0), Choice(1), Choice(2)))


async def test_a_finished_choice_is_computed_no_more() -> None:
    """Also one that was never there, of a request that never was, and twice."""
    async with (
        decode_node() as (node, _, (gate,)),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        stub = pb_grpc.DecodeStub(channel)

        async def finish(choice: int, request_id: str = "three") -> None:
            await stub.FinishChoice(pb.FinishChoiceRequest(request_id=request_id, choice=choice))

        tokens, finished = {0: 0, 1: 0, 2: 0}, set()
        scheduler = node.replicas[0].scheduler
        gate.let(10)
        async for event in run_job(channel, JOB):
            if not isinstance(event, JobTokens):
                continue
            tokens[event.choice] += len(event.token_ids)
            if tokens[1] >= 5 and 1 not in finished:
                finished.add(1)
                await finish(1)
                await finish(1)
                await finish(7)
                await finish(0, "another")
                gate.let(16)
            if tokens[0] >= 20 and 0 not in finished:
                finished.add(0)
                await finish(0)
                gate.let()
        assert tokens[2] == 200 and 5 <= tokens[1] < 20 and 20 <= tokens[0] < 40
        assert scheduler.generation_tokens < sum(tokens.values()) + 10
        await eventually(lambda: scheduler.pool.num_free == scheduler.pool.num_blocks)


async def test_the_last_finished_choice_ends_the_call() -> None:
    async with (
        decode_node() as (node, _, (gate,)),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        stub = pb_grpc.DecodeStub(channel)
        job = replace(JOB, choices=(Choice(0),))
        gate.let(5)
        async for event in run_job(channel, job):
            if not isinstance(event, JobTokens):
                continue
            await stub.FinishChoice(pb.FinishChoiceRequest(request_id="three", choice=0))
            gate.let()
        scheduler = node.replicas[0].scheduler
        await eventually(lambda: scheduler.pool.num_free == scheduler.pool.num_blocks)
        assert scheduler.generation_tokens < 100
