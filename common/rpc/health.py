"""The standard health service (`grpc.health.v1`), which is open to everyone, with bounded cost.

On a server that requires a cluster key or TLS it does not read the request, which could have 64
MiB, and answers for the whole server: all its services have the same health.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb

from pdserve.common.core.errors import DeadlineExceeded, InvalidRequest
from pdserve.common.rpc.receive import Context, Handler, one_of_few, read_message
from pdserve.common.rpc.status import serving

SERVICE = "/grpc.health.v1.Health/"
MAX_NBYTES = 4096  # per request, which is a service's name
MAX_READS, MAX_OWN_READS = 64, 16  # requests read at a time, in all and per host
READ = 5.0  # seconds for a request to arrive
MAX_WATCHES, MAX_OWN_WATCHES = 128, 16  # Watch calls at a time, in all and per host
WATCH = 600.0  # seconds until a Watch ends; the client calls again

_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The service. Other services are unknown until `set`; the whole server, '', is SERVING."""

    def __init__(self, reads: bool) -> None:
        """`reads`: whether to read the requested service's name."""
        self._reads = reads
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {
            "": pb.HealthCheckResponse.SERVING
        }
        self._changed = asyncio.Event()  # replaced by each change
        self._reads_now: Counter[str] = Counter()  # by host
        self._watches: Counter[str] = Counter()

    def set(self, services: tuple[str, ...], status: pb.HealthCheckResponse.ServingStatus) -> None:
        if any(self._statuses.get(name) != status for name in services):
            self._statuses.update(dict.fromkeys(services, status))
            self._changed.set()
            self._changed = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        encode = pb.HealthCheckResponse.SerializeToString
        if details.method == SERVICE + "Check":
            return grpc.stream_unary_rpc_method_handler(self._check, None, encode)
        if details.method == SERVICE + "Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch, None, encode)
        return None

    async def _check(self, _: Any, context: Context) -> pb.HealthCheckResponse:
        async with serving(context):
            name = await self._asked(context)
        if (status := self._statuses.get(name)) is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "the server has no such service",
            )
        return pb.HealthCheckResponse(status=status)

    async def _watch(self, _: Any, context: Context) -> None:
        async with serving(context):
            name = await self._asked(context)
            with one_of_few(self._watches, context, MAX_WATCHES, MAX_OWN_WATCHES, "watch health"):
                await self._tell(name, context)

    async def _tell(self, name: str, context: Context) -> None:
        told = None
        try:
            async with asyncio.timeout(WATCH):
                while True:
                    changed, status = self._changed, self._statuses.get(name, _UNKNOWN)
                    if status != told:
                        await context.write(pb.HealthCheckResponse(status=status))
                    told = status
                    await changed.wait()
        except TimeoutError:
            return

    async def _asked(self, context: Context) -> str:
        if not self._reads:
            return ""
        with one_of_few(self._reads_now, context, MAX_READS, MAX_OWN_READS, "ask for health"):
            try:
                async with asyncio.timeout(READ):
                    raw = await read_message(context, MAX_NBYTES)
                return pb.HealthCheckRequest.FromString(raw).service
            except TimeoutError:
                raise DeadlineExceeded("the request came too slowly") from None
            except DecodeError:
                raise InvalidRequest("the message is not of the method's type") from None
