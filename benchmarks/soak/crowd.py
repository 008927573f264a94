"""A crowd of concurrent gRPC calls in its own process: in the soak's process, its answers would
delay those of the load, which shares the event loop.

    python -m benchmarks.soak.crowd    # reads a `Crowd` as JSON, writes the counts of answers

On a busy machine, calls are answered late when there are thousands. The crowd counts as hung if no
call is answered for a while.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import grpc

from benchmarks.fleet import HOSTILE, Fleet
from benchmarks.soak.faults import Fault, Faults
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

BURST = 4000  # calls at once
SILENCE = 60  # seconds without an answer to any call, after which the rest hangs
HUNG = "hung"
UNEXPLAINED = "without a reason"  # a call that ended without a reason from the router: a failure
CUT_SHORT = "Internal error from Core"  # grpc.aio's own INTERNAL, in place of the server's status
GONE = "the router had gone"  # a failure too, unless the router was killed
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Crowd:
    calls: int
    address: str
    metadata: dict[str, str]
    files: tuple[str, str, str] | None  # CA, key, certificate; None: without TLS

    async def ask(self) -> Counter[str]:
        """Runs the crowd; returns outcome → count."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            told, _ = await process.communicate(json.dumps(asdict(self)).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"the crowd ended with {process.returncode}")
        return Counter(json.loads(told))


def crowd_at(fleet: Fleet, calls: int) -> Crowd:
    """Returns a crowd of `calls` hostile calls to the fleet's first router."""
    address = f"127.0.0.1:{fleet.ports['grpc']}"
    return Crowd(calls, address, fleet.api_key(HOSTILE), fleet.client_files())


async def burst(faults: Faults, fault: Fault) -> None:
    """Four thousand calls at once. Each is answered or refused with a code of ours, except by a
    router that is killed."""
    since = monotonic()
    with faults.crowds.lasting():
        told = await crowd_at(faults.fleet, BURST).ask()
    if not faults.router_dead["router"].meet(since, monotonic()):
        told[UNEXPLAINED] += told.pop(GONE, 0)
    for words, count in (+told).items():
        faults.answers["burst", f"calls at once: {words}"] += count


async def ask_at_once(crowd: Crowd) -> Counter[str]:
    told: Counter[str] = Counter()
    async with _channel(crowd) as channel:
        stub = pb_grpc.InferenceStub(channel)

        async def ask() -> None:
            told[await _ask(stub, crowd)] += 1

        calls = asyncio.gather(*(ask() for _ in range(crowd.calls)))
        silence = asyncio.create_task(_silence(told))
        await asyncio.wait((calls, silence), return_when=asyncio.FIRST_COMPLETED)
        silence.cancel()
        if not calls.done():
            told[HUNG] += crowd.calls - told.total()
            calls.cancel()
            await asyncio.gather(calls, return_exceptions=True)
        elif calls.exception() is not None:
            await calls
    return told


async def _silence(told: Counter[str]) -> None:
    """Waits until no call was answered for SILENCE turns of a second each. A process without a CPU
    has fewer turns, and receives in each what has arrived."""
    known = quiet = 0
    while quiet < SILENCE:
        await asyncio.sleep(1)
        quiet = quiet + 1 if told.total() == known else 0
        known = told.total()


def _channel(crowd: Crowd) -> grpc.aio.Channel:
    if crowd.files is None:
        return grpc.aio.insecure_channel(crowd.address)
    files = (Path(name).read_bytes() for name in crowd.files)
    return grpc.aio.secure_channel(crowd.address, grpc.ssl_channel_credentials(*files))


async def _ask(stub: pb_grpc.InferenceStub, crowd: Crowd) -> str:
    sampling = pb.SamplingParams(max_tokens=1, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling)
    try:
        async for _ in stub.Generate(request, metadata=tuple(crowd.metadata.items())):
            pass
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    return "OK"


def refusal(error: grpc.aio.AioRpcError) -> str:
    """Returns what a call was told that did not end well."""
    if "pdserve-error-code" in {key for key, _ in error.trailing_metadata() or ()}:
        return error.code().name
    if error.details() == CUT_SHORT:
        return "ended during a write"
    return GONE if error.code() is grpc.StatusCode.UNAVAILABLE else UNEXPLAINED


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(asyncio.run(ask_at_once(Crowd(**given))), sys.stdout)
