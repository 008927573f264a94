"""A decode node's part in a hand-over, which does not wait for the step that its ranks are at, and
jobs of which it computes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from live_node import Gate, Said, decode_node, eventually, run_job
from pdserve.common.core.errors import Blame, NodeError
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc.convert import job_to_pb
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.pb import inference_pb2
from pdserve.common.rpc.tokens import JobTokens
from pdserve.decode_node import router_streams
from pdserve.decode_node.node import DecodeNode

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
JOB = GenerateJob("here", tuple(range(3, 67)), PARAMS)  # four blocks
CHOICES = GenerateJob("three", JOB.prompt_token_ids, replace(PARAMS, max_tokens=200, seed=3))
FIRST = pb.FirstToken(token=pb.TokenEvent(tokens=[inference_pb2.Token(id=7)]))


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[DecodeNode, Gate, grpc.aio.Channel]]:
    """A node, the gate of its steps, and a way to it; all of its blocks are free in the end."""
    async with (
        decode_node() as (node, _, (gate,)),
        grpc.aio.insecure_channel(node.address) as channel,
        asyncio.timeout(60),
    ):
        yield node, gate, channel
        pool = node.replicas[0].scheduler.pool
        await eventually(lambda: pool.num_free == pool.num_blocks)


def event(said: Said) -> pb.DecodeEvent:
    assert isinstance(said, pb.DecodeEvent)
    return said


async def test_a_step_that_runs_holds_up_neither_reservation_nor_landing() -> None:
    """All of the second job's KV is in the prefix cache: it lands with the commit."""
    async with serving() as (node, gate, channel):
        engine = node.replicas[0].engine
        gate.let(1)  # the step that computes the prompt, and draws the first token
        running = run_job(channel, JOB)
        while not isinstance(await anext(running), JobTokens):
            pass
        step = engine.progress().step
        handed_over = run_job(channel, replace(JOB, request_id="there"), local_prefill=False)
        ticket = event(await anext(handed_over)).reserved
        assert ticket.first_blocks == [4]
        commit = pb.CommitRequest(transfer_id=ticket.transfer_id, epoch=1, first_token=FIRST)
        await pb_grpc.KVTransferStub(channel).Commit(commit)
        landed = event(await anext(handed_over)).landed
        assert landed.first_token == FIRST and landed.cached_tokens == 64
        assert engine.progress().computing and engine.progress().step <= step + 1
        gate.let()
        for said in (running, handed_over):
            left = [len(each.token_ids) async for each in said if isinstance(each, JobTokens)]
            assert sum(left) == 39


async def test_a_job_begins_when_its_stream_is_open_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_streams, "OPEN_TIMEOUT", 0.1)
    async with serving() as (node, _, channel):
        stub = pb_grpc.DecodeStub(channel)
        for name, code in (("", "INVALID_REQUEST"), ("never-opened", "TOKEN_STREAM_LOST")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Run(
                    pb.DecodeRequest(job=job_to_pb(JOB), local_prefill=True, stream=name)
                )
            assert dict(caught.value.trailing_metadata())["pdserve-error-code"] == code
        assert not node.replicas[0].sessions
        assert node.replicas[0].scheduler.prompt_tokens == 0


async def test_a_node_that_fails_says_so_after_all_tokens_before() -> None:
    async with serving() as (node, gate, channel):
        gate.let(10)
        said: list[Said] = []
        with pytest.raises(NodeError) as caught:
            async for each in run_job(channel, JOB):
                said.append(each)
                if len(said) == 6:
                    error = NodeError("it fails", code="RANK_DIED", blame=Blame.DECODE)
                    node._fail_sessions(error)
                    gate.let()
        assert (caught.value.code, caught.value.blame) == ("RANK_DIED", Blame.DECODE)
        prefilled, *tokens = said
        assert event(prefilled).HasField("prefilled") and len(tokens) >= 5
        assert [t.position for t in tokens if isinstance(t, JobTokens)] == [*range(len(tokens))]


async def test_a_client_that_leaves_as_its_kv_lands_leaves_no_block() -> None:
    async with serving() as (node, _, channel):
        first = run_job(channel, JOB)
        await anext(first)
        for turn in range(20):
            said = run_job(channel, replace(JOB, request_id=str(turn)), local_prefill=False)
            ticket = event(await anext(said)).reserved
            request = pb.CommitRequest(transfer_id=ticket.transfer_id, epoch=1, first_token=FIRST)
            commit = pb_grpc.KVTransferStub(channel).Commit(request)
            for _ in range(turn):
                await asyncio.sleep(0)
            await said.aclose()
            await asyncio.wait([asyncio.ensure_future(commit)])
        await first.aclose()
        await eventually(lambda: not node.replicas[0].sessions)


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ({"id": 512}, "token id 512"),
        ({"id": 1, "logprob": -1.0, "top_logprobs": [{"token_id": 512}]}, "token id 512"),
        ({"id": 1, "logprob": -1.0, "top_logprobs": [{"token_id": 1}] * 21}, "at most 20"),
    ],
)
async def test_a_commit_is_not_trusted(token: dict[str, Any], says: str) -> None:
    async with serving() as (_, _, channel):
        handed_over = run_job(channel, JOB, local_prefill=False)
        ticket = event(await anext(handed_over)).reserved
        odd = pb.FirstToken(token=pb.TokenEvent(tokens=[inference_pb2.Token(**token)]))
        commit = pb.CommitRequest(transfer_id=ticket.transfer_id, epoch=1, first_token=odd)
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await pb_grpc.KVTransferStub(channel).Commit(commit)
        await handed_over.aclose()


async def test_a_finished_choice_is_computed_no_more() -> None:
    """Also one that was never there, of a request that never was, and twice."""
    async with serving() as (node, gate, channel):
        stub = pb_grpc.DecodeStub(channel)

        async def finish(choice: int, request_id: str = "three") -> None:
            await stub.FinishChoice(pb.FinishChoiceRequest(request_id=request_id, choice=choice))

        job = replace(CHOICES, choices=(Choice(0), Choice(1), Choice(2)))
        tokens, finished = {0: 0, 1: 0, 2: 0}, set()
        scheduler = node.replicas[0].scheduler
        gate.let(10)
        async for event in run_job(channel, job):
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


async def test_the_last_finished_choice_ends_the_call() -> None:
    async with serving() as (node, gate, channel):
        stub = pb_grpc.DecodeStub(channel)
        job = CHOICES
        gate.let(5)
        async for event in run_job(channel, job):
            if not isinstance(event, JobTokens):
                continue
            await stub.FinishChoice(pb.FinishChoiceRequest(request_id="three", choice=0))
            gate.let()
        scheduler = node.replicas[0].scheduler
        assert scheduler.generation_tokens < 100
