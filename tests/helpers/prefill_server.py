"""A gRPC server with one servicer of the prefill role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import AuthInterceptor, GrpcServer
from pdserve.common.rpc.tls import TLS


@asynccontextmanager
async def serving_prefill(
    servicer: pb_grpc.PrefillServicer, auth: AuthInterceptor | None = None, tls: TLS | None = None
) -> AsyncIterator[str]:
    """Yields the server's address."""
    server = GrpcServer(auth) if auth else GrpcServer()
    descriptor = pb.DESCRIPTOR.services_by_name["Prefill"]
    server.add(descriptor, pb_grpc.add_PrefillServicer_to_server, servicer)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls)}"
    if auth:
        auth.address = address
    await server.start()
    await server.set_healthy(True)
    try:
        yield address
    finally:
        await server.stop(0)
