"""A crowd of concurrent gRPC calls. It has a process of its own (`attackers.py`): its answers would
delay those of other attacks, which share an event loop.

On a busy machine, calls are answered late when there are thousands. So an answer to any call is
progress of all.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc

from benchmarks.access import HOSTILE
from benchmarks.soak.attack import HUNG, Attack, Wait, at_grpc, calls, refusal
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

BURST = 4000  # calls at once


async def burst(attack: Attack) -> None:
    """Four thousand calls at once. Each is answered or refused with a code of ours, except by a
    router that is killed."""
    await ask_at_once(attack, BURST)


async def ask_at_once(attack: Attack, count: int) -> None:
    address = f"127.0.0.1:{attack.fleet.ports['grpc']}"
    key = tuple(attack.fleet.api_key(HOSTILE).items())
    told: Counter[str] = Counter()

    async def ask_all(wait: Wait) -> str:
        async with calls(attack.fleet, address) as channel:
            stub = pb_grpc.InferenceStub(channel)

            async def ask() -> None:
                told[await _ask(stub, key)] += 1
                wait.moved()

            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(ask())
        return ""

    await attack.outcome_of(ask_all, at_grpc(attack.fleet, address))
    told[HUNG] += count - told.total()
    for words, times in (+told).items():
        attack.tell(f"calls at once: {words}", times)


async def _ask(stub: pb_grpc.InferenceStub, key: tuple[tuple[str, str], ...]) -> str:
    sampling = pb.SamplingParams(max_tokens=1, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling)
    try:
        async for _ in stub.Generate(request, metadata=key):
            pass
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    return "OK"
