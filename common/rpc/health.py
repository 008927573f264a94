"""The standard health service (`grpc.health.v1`), which is open to everyone, with bounded cost.

On a server that requires a cluster key or TLS it does not read the request, which could have 64
MiB, and answers for the whole server: all its services have the same health.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb

from pdserve.common.core.errors import InvalidRequest, Overloaded
from pdserve.common.rpc.receive import Context, Handler, read_message
from pdserve.common.rpc.status import serving

SERVICE = "/grpc.health.v1.Health/"
MAX_NBYTES = 4096  # per request, which is a service's name
MAX_READS = 16  # requests being read at once
MAX_WATCHES = 128  # concurrent Watch calls
MAX_OWN_WATCHES = 16  # concurrent Watch calls per host
WATCH = 600.0  # seconds until a Watch call ends; clients can call again

_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The service. Other services are unknown until `set`; the whole server, '', is SERVING."""

    def __init__(self, reads: bool) -> None:
        """`reads`: whether to read the requested service's name."""
        self._reads = reads
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {
            "": pb.HealthCheckResponse.SERVING
        }
        self._changed = asyncio.Event()  # replaced at each change
        self._reading = 0
        self._watches: Counter[str] = Counter()  # by host

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
            with self._watching(context):
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
        if self._reading >= MAX_READS:
            raise Overloaded("too many concurrent health requests", retry_after=1.0)
        self._reading += 1
        try:
            raw = await read_message(context, MAX_NBYTES)
            return pb.HealthCheckRequest.FromString(raw).service
        except DecodeError:
            raise InvalidRequest("the message is not of the method's type") from None
        finally:
            self._reading -= 1

    @contextmanager
    def _watching(self, context: Context) -> Iterator[None]:
        host = context.peer().rpartition(":")[0]
        if self._watches.total() >= MAX_WATCHES or self._watches[host] >= MAX_OWN_WATCHES:
            raise Overloaded("too many concurrent health watches", retry_after=60.0)
        self._watches[host] += 1
        try:
            yield
        finally:
            self._watches[host] -= 1
            self._watches += Counter()  # drops hosts with 0
