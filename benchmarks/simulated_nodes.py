"""Simulates a fleet of nodes without engines in one process, over real gRPC.

    python benchmarks/simulated_nodes.py --router 127.0.0.1:8002 --model NAME --decode 500

Each node has its own address, and registers and sends heartbeats like a real one. All jobs get a
token every `--step` seconds, independent of load; no KV is moved. All prefill nodes are one gRPC
server with many ports, and so are all decode nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdserve.common.core.host import raise_open_file_limit
from pdserve.common.node.registration import Registrations
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.convert import event_from_pb
from pdserve.common.rpc.kv_events import AllBlocksCleared, KVEventBatch, encode_batch
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2
from pdserve.common.rpc.server import KEEPALIVE
from pdserve.decode_node.router_streams import JobWriter, RouterStreams

OPTIONS = [
    *KEEPALIVE,
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.server.max_pending_requests", 2**15),
    ("grpc.server.max_pending_requests_hard_limit", 2**15),
]
TOKEN_IDS = range(40, 90)
NUM_BLOCKS = 4096
_bytes = lambda message: message.SerializeToString()  # noqa: E731


class Nodes:
    """All simulated nodes. A hand-off is a future by transfer id, since both ends are here."""

    def __init__(self, step: float) -> None:
        """`step`: seconds between two tokens of a job."""
        self._step = step
        self._stepped = asyncio.Event()
        self._committed: dict[bytes, asyncio.Future[pb.FirstToken]] = {}
        self._streams = RouterStreams()
        self._numbers = itertools.count()
        self._servers: list[grpc.aio.Server] = []  # kept alive: collected servers stop

    async def open(self, role: int, count: int) -> list[str]:
        """Starts `count` nodes of a role; returns their addresses."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        if role == pb.ROLE_PREFILL:
            run = stream(self._prefill, pb.PrefillRequest.FromString, _bytes)
            name, methods = "Prefill", {"Run": run}
        else:
            name, methods = (
                "Decode",
                {
                    "Run": unary(self._decode, pb.DecodeRequest.FromString, _bytes),
                    "FinishChoice": unary(
                        self._finish_choice, pb.FinishChoiceRequest.FromString, _bytes
                    ),
                    "Events": stream(self._events, pb.EventsRequest.FromString, _bytes),
                },
            )
        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.method_handlers_generic_handler(f"pdserve.v1.{name}", methods)
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        subscribe = stream(self._nothing_cached, pb.KVEventsRequest.FromString, _bytes)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pdserve.v1.KVEvents", {"Subscribe": subscribe}),)
        )
        ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(count)]
        await server.start()
        self._servers.append(server)
        return [f"127.0.0.1:{port}" for port in ports]

    async def steps(self) -> None:
        """Gives all jobs a token per step, like one batch. Never returns."""
        while True:
            await asyncio.sleep(self._step)
            self._stepped.set()
            self._stepped = asyncio.Event()

    # ---- jobs --------------------------------------------------------------------------------

    async def _prefill(self, request: pb.PrefillRequest, _: Any) -> AsyncIterator[Any]:
        job = request.job
        first = pb.FirstToken(token=_token(len(job.prompt_token_ids), job))
        yield pb.PrefillEvent(first_token=first)
        committed = self._committed.get(request.ticket.transfer_id)
        if committed is not None and not committed.done():
            committed.set_result(first)
        yield pb.PrefillEvent(handed_off=pb.HandedOff(transfer_s=0.001))

    async def _decode(self, request: pb.DecodeRequest, _: Any) -> pb.DecodeResponse:
        with self._streams.named(request.stream) as stream:
            await stream.until_open()
            with stream.job(request.job_number, lambda error: None) as writer:
                await self._run(request, writer)
                writer.end()
        return pb.DecodeResponse()

    async def _run(self, request: pb.DecodeRequest, writer: JobWriter) -> None:
        job = request.job
        prompt = len(job.prompt_token_ids)
        transfer_id = next(self._numbers).to_bytes(16)
        committed = self._committed[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            writer.event(pb.DecodeEvent(reserved=pb.Ticket(transfer_id=transfer_id, epoch=1)))
            first = await committed
        finally:
            del self._committed[transfer_id]
        writer.event(pb.DecodeEvent(landed=pb.Landed(bytes=1, first_token=first)))
        for count in range(1, job.sampling.max_tokens):
            await self._stepped.wait()
            writer.tokens(count, event_from_pb(_token(prompt + count, job)))

    async def _events(self, request: pb.EventsRequest, _: Any) -> AsyncIterator[Any]:
        async for message in self._streams.messages(request.stream):
            yield message

    async def _nothing_cached(self, request: pb.KVEventsRequest, _: Any) -> AsyncIterator[Any]:
        snapshot = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()]))
        yield pb.KVEventsMessage(batch=snapshot)
        await asyncio.get_running_loop().create_future()  # until the router disconnects

    async def _finish_choice(self, request: Any, _: Any) -> pb.FinishChoiceResponse:
        return pb.FinishChoiceResponse()


def _token(position: int, job: pb.Job) -> pb.TokenEvent:
    last = position - len(job.prompt_token_ids) + 1 >= job.sampling.max_tokens
    return pb.TokenEvent(
        choice=job.choices[0].index,
        tokens=[inference_pb2.Token(id=TOKEN_IDS[position % len(TOKEN_IDS)])],
        finish_reason=inference_pb2.FINISH_REASON_LENGTH if last else None,
    )


# ---- registration ----


def info(role: int, address: str, model: str) -> pb.NodeInfo:
    node_id = f"{'prefill' if role == pb.ROLE_PREFILL else 'decode'}-{address.rpartition(':')[2]}"
    return pb.NodeInfo(
        node_id=node_id, role=role, address=address, model=model, fingerprint="simulated",
        kv_connectors=["tcp"], num_blocks=NUM_BLOCKS, instance=secrets.token_hex(8),
        data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
    )  # fmt: skip


def load(router: str) -> pb.NodeLoad:
    blocks = {"free_blocks": NUM_BLOCKS, "most_free_blocks": NUM_BLOCKS, "total_blocks": NUM_BLOCKS}
    return pb.NodeLoad(healthy=True, reason="ok", **blocks)


async def run(routers: Sequence[str], model: str, sizes: dict[int, int], step: float) -> None:
    """Serves until cancelled."""
    nodes = Nodes(step)
    async with asyncio.TaskGroup() as group:
        group.create_task(nodes.steps())
        for role, count in sizes.items():
            for address in await nodes.open(role, count):
                group.create_task(_register(routers, info(role, address, model)))


async def _register(routers: Sequence[str], node: pb.NodeInfo) -> None:
    channels = Channels()
    try:
        await Registrations(routers, node, load, channels).run()
    finally:
        await channels.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", required=True, help="HOST:PORT of the router's registry")
    parser.add_argument("--model", required=True, help="model name that the router serves")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.01, help="seconds between two tokens")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    raise_open_file_limit(8 * (args.prefill + args.decode) + 256)
    sizes = {pb.ROLE_PREFILL: args.prefill, pb.ROLE_DECODE: args.decode}
    asyncio.run(run(args.router.split(","), args.model, sizes, args.step))


if __name__ == "__main__":
    main()
