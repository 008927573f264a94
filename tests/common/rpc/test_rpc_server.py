"""gRPC over links that are cut without a reset, and pings that peers accept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from benchmarks.fleet import free_port
from links import Link
from pdserve.common.rpc import channels as rpc_channels
from pdserve.common.rpc import server as rpc_server
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.rpc.status import serving
from prefill_server import serving_prefill

FAST = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}


class SilentPrefill(pb_grpc.PrefillServicer):
    """Says one thing and then nothing, until its caller is gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvent]:
        yield pb.PrefillEvent()
        try:
            await asyncio.sleep(60)
        finally:
            self.gone.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[SilentPrefill, Link, str]]:
    """A server, a link to it, and the link's address."""
    servicer = SilentPrefill()
    async with serving_prefill(servicer) as address:
        link = Link(int(address.rpartition(":")[2]))
        proxy = await asyncio.start_server(link.join, "127.0.0.1", 0)
        try:
            yield servicer, link, f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        finally:
            link.close()
            proxy.close()


async def answered(stub: pb_grpc.PrefillStub) -> grpc.aio.UnaryStreamCall:
    """Calls until it is answered: when all stands still for a second, an uncut link is lost too."""
    async with asyncio.timeout(60):
        while True:
            call = stub.Run(pb.PrefillRequest())
            with suppress(grpc.aio.AioRpcError):
                await call.read()
                return call


def faster(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, FAST.get(name, value)) for name, value in options]


async def test_both_ends_notice_that_a_link_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 15 seconds; here they hurry."""
    for options in (dict(rpc_server._OPTIONS), dict(rpc_channels._OPTIONS)):
        assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 15_000
    monkeypatch.setattr(rpc_server, "_OPTIONS", faster(rpc_server._OPTIONS))
    monkeypatch.setattr(rpc_channels, "_OPTIONS", faster(rpc_channels._OPTIONS))
    async with linked() as (servicer, link, address):
        channels = Channels()
        call = await answered(pb_grpc.PrefillStub(channels.get(address)))
        servicer.gone.clear()
        link.cut = True
        await asyncio.wait_for(servicer.gone.wait(), 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channels.close()


async def test_pings_are_never_too_many() -> None:
    async with linked() as (servicer, _, address):
        eager = [("grpc.keepalive_time_ms", 20), ("grpc.http2.max_pings_without_data", 0)]
        async with grpc.aio.insecure_channel(address, options=eager) as channel:
            call = pb_grpc.PrefillStub(channel).Run(pb.PrefillRequest())
            await call.read()
            await asyncio.sleep(1)
            assert not call.done() and not servicer.gone.is_set()
            call.cancel()


class Unready(SilentPrefill):
    """Has something to say when its call has ended already."""

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with serving(context):
            yield pb.PrefillEvent()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            try:
                await context.write(pb.PrefillEvent())
            finally:
                self.gone.set()


@pytest.mark.parametrize("leaves", ["client", "server"])
async def test_writing_after_the_call_s_end_is_no_defect(
    leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = Unready()
    async with serving_prefill(servicer) as address, grpc.aio.insecure_channel(address) as channel:
        call = await answered(pb_grpc.PrefillStub(channel))
        if leaves == "client":
            call.cancel()
            await asyncio.wait_for(servicer.gone.wait(), 60)
    await asyncio.wait_for(servicer.gone.wait(), 60)
    assert "unexpected error" not in caplog.text and "Traceback" not in caplog.text


def test_calls_may_wait_for_a_busy_event_loop_for_an_hour() -> None:
    """gRPC cancels without a word what has waited for longer: as if its client had left."""
    assert dict(rpc_server._OPTIONS)["grpc.server_max_unrequested_time_in_server"] >= 3600


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_it_binds_to_an_address_with_colons(host: str) -> None:
    server, channels = GrpcServer(), Channels()
    port = server.bind(host, 0)
    await server.start()
    async with asyncio.timeout(60):
        await channels.get(f"[::1]:{port}").channel_ready()
    await channels.close()
    await server.stop(0)


async def test_a_peer_that_restarts_is_found_at_once() -> None:
    """Even after it was away for a while, which makes gRPC try less often, but not too seldom."""
    assert dict(rpc_channels._OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 2000
    first = GrpcServer()
    port = first.bind("127.0.0.1", free_port())  # no other process gets it meanwhile
    channels = Channels()
    await first.start()
    channel = channels.get(f"127.0.0.1:{port}")
    async with asyncio.timeout(60):
        await channel.channel_ready()
        await first.stop(0)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await pb_grpc.PrefillStub(channel).Run(pb.PrefillRequest()).read()
        second = GrpcServer()
        assert second.bind("127.0.0.1", port) == port
        await second.start()
        await channel.channel_ready()
    await channels.close()
    await second.stop(0)
