"""A real decode node with a tiny model in this process, whose steps a test can hold."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import torch

from paths import MODELS
from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
)
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.node import NodeConfig, WorkerNodeConfig
from pdserve.common.core.errors import Blame
from pdserve.common.core.request import GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.distributed.executor import Executor
from pdserve.common.rpc.convert import job_to_pb
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import failure_from_pb, from_rpc_error
from pdserve.common.rpc.tokens import JobEvent, JobTokens, decode_events
from pdserve.decode_node.node import DecodeNode
from waiting import eventually

MODEL = MODELS / "mistral"


def node_config(replicas: int = 1, lora: LoRAConfig | None = None) -> WorkerNodeConfig:
    return WorkerNodeConfig(
        node=NodeConfig(router="127.0.0.1:9"),
        engine=EngineConfig(
            model=ModelConfig(model=str(MODEL), dtype="float32"),
            parallel=ParallelConfig(device="cpu", cpu_threads=1, data_parallel_size=replicas),
            cache=CacheConfig(num_gpu_blocks_override=256),
            lora=lora or LoRAConfig(),
        ),
    )


@asynccontextmanager
async def decode_node(
    replicas: int = 1, lora: LoRAConfig | None = None
) -> AsyncIterator[tuple[DecodeNode, asyncio.Task[int], list[Gate]]]:
    """Yields the node, its serving task, and a gate per replica. No router runs at its router's
    address."""
    torch_threads = torch.get_num_threads()
    node = DecodeNode(node_config(replicas, lora))
    serving = asyncio.create_task(node.serve())
    await eventually(lambda: node.server._metrics or serving.done(), 120)
    gates = [Gate(replica.ranks.executor) for replica in node.replicas]
    try:
        yield node, serving, gates
    finally:
        for gate in gates:
            gate.let()
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 60)
        torch.set_num_threads(torch_threads)


class Gate:
    """Holds steps while it is shut. `let` opens it, optionally for a number of steps, after which
    it shuts itself: then a node is at most that far ahead of its client."""

    def __init__(self, executor: Executor) -> None:
        self.open = asyncio.Event()
        self.let()
        self._step = executor.step
        executor.step = self.step  # type: ignore[method-assign]

    def let(self, steps: float = math.inf) -> None:
        """Releases the held step, and `steps` more."""
        self._left = steps
        self.open.set()

    async def step(self, message: bytes) -> bytes:
        answer = await self._step(message)
        if self._left:
            self._left -= 1
        else:
            self.open.clear()
        await self.open.wait()
        return answer


async def generate(channel: grpc.aio.Channel, first: int = 3) -> int:
    """Returns the number of tokens generated for a prompt that begins with `first`. Raises the
    node's typed error."""
    prompt = tuple(range(first, first + 37))
    job = GenerateJob("r", prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    said = [event async for event in run_job(channel, job)]
    return sum(len(event.token_ids) for event in said if isinstance(event, JobTokens))


Said = JobTokens | pb.DecodeEvent


async def run_job(
    channel: grpc.aio.Channel, job: GenerateJob, local_prefill: bool = True
) -> AsyncGenerator[Said, None]:
    """Yields a job's events until its end, on a stream of its own; closing the generator cancels
    the job. Raises the node's typed error."""
    stub, name = pb_grpc.DecodeStub(channel), secrets.token_hex(8)
    events = stub.Events(pb.EventsRequest(stream=name))
    call = stub.Run(pb.DecodeRequest(job=job_to_pb(job), local_prefill=local_prefill, stream=name))
    running = asyncio.ensure_future(_outcome(call))
    try:
        while True:
            reading = asyncio.ensure_future(events.read())
            await asyncio.wait((reading, running), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                running.result()  # else it has been refused
            for each in decode_events((await reading).events):
                said = each.event() if isinstance(each, JobEvent) else each
                if isinstance(said, pb.DecodeEvent) and said.HasField("ended"):
                    if said.ended.HasField("failure"):
                        raise failure_from_pb(said.ended.failure, Blame.DECODE)
                    return
                yield said
    finally:
        running.cancel()
        events.cancel()


async def _outcome(call: Any) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, Blame.DECODE) from None
