"""A node and its routers: all that --router names, each for itself, looked up again and again."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
import pytest

from paths import MODELS
from pdserve.cli import certs
from pdserve.common.config.engine import EngineConfig, ModelConfig, ParallelConfig
from pdserve.common.config.node import NodeConfig, WorkerNodeConfig
from pdserve.common.config.shared import AuthConfig, TLSConfig
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.node import registration
from pdserve.common.node.registration import Registrations, several
from pdserve.common.rpc.channels import Channels, Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.decode_node.node import DecodeNode
from pdserve.router.cluster.registry_service import check_shape
from waiting import eventually

# Seconds that a router may take to answer: where one hangs, and where all are there.
HASTY, PATIENT = 0.5, 10.0
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Router(pb_grpc.RegistryServicer):
    """Notes who registers. One that hangs answers nothing."""

    def __init__(self) -> None:
        self.hangs = False
        self.present: set[str] = set()
        self.hangs_up = False  # after each heartbeat
        self.beats = self.streams = 0
        self.id = token_hex(4)
        self.load = pb.NodeLoad()  # the last
        self.siblings: list[int] = []  # ports

    async def Register(self, request: pb.RegisterRequest, _: Any) -> pb.RegisterResponse:
        await self._hang()
        self.present.add(request.node.node_id)
        return pb.RegisterResponse(
            heartbeat_interval_s=0.02, router=self.id, sibling_ports=self.siblings
        )

    async def Heartbeats(
        self, requests: AsyncIterator[pb.HeartbeatRequest], _: Any
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        self.streams += 1
        async for request in requests:
            await self._hang()
            self.beats += 1
            self.load = request.load
            yield pb.HeartbeatResponse(known=request.node_id in self.present)
            if self.hangs_up:
                return

    async def Deregister(self, request: pb.DeregisterRequest, _: Any) -> pb.DeregisterResponse:
        await self._hang()
        self.present.discard(request.node_id)
        return pb.DeregisterResponse()

    async def _hang(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()


@asynccontextmanager
async def serving(
    host: str, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[tuple[Router, int]]:
    router, server = Router(), grpc.aio.server()
    pb_grpc.add_RegistryServicer_to_server(router, server)
    address = f"{host}:{port}"
    port = (
        server.add_secure_port(address, credentials)
        if credentials
        else server.add_insecure_port(address)
    )
    await server.start()
    try:
        yield router, port
    finally:
        await server.stop(0)


def load(router: str) -> pb.NodeLoad:
    """Each router is told something else."""
    return pb.NodeLoad(reason=router)


@asynccontextmanager
async def node(*routers: str, channels: Channels | None = None) -> AsyncIterator[Registrations]:
    """A node that keeps itself registered there."""
    channels = Channels() if channels is None else channels
    made = Registrations(routers, pb.NodeInfo(node_id="decode-1"), load, channels)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await channels.close()


@contextmanager
def names(monkeypatch: pytest.MonkeyPatch, known: dict[str, list[str]]) -> Iterator[None]:
    """Names that the event loop looks up here; one without addresses is a name server's failure."""

    async def look_up(self: object, host: str, port: int, **_: object) -> list[Any]:
        if not known[host]:
            raise socket.gaierror("no answer")
        return [(None, None, 0, "", (address, port)) for address in known[host]]

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
        patched.setattr(registration, "_LOOK_UP_PERIOD", 0.02)
        yield


async def test_a_router_that_hangs_or_is_away_is_no_trouble_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
    monkeypatch.setattr(registration, "_RETRY_DELAY", 0.02)
    async with serving(HOSTS[0]) as (good, port), serving(HOSTS[1]) as (bad, other):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            away = f"127.0.0.1:{probe.getsockname()[1]}"
            async with node(f"{HOSTS[0]}:{port}", f"{HOSTS[1]}:{other}", away) as here:
                await eventually(lambda: good.load.routers == bad.load.routers == 2)
                assert (good.load.reason, bad.load.reason) == (good.id, bad.id)
                monkeypatch.setattr(registration, "_RPC_TIMEOUT", HASTY)
                bad.hangs = True
                before = good.beats
                await eventually(lambda: good.beats > before + 10 and good.load.routers == 1)
                bad.hangs = False
                bad.present.clear()  # as if it had been started again
                await eventually(lambda: bad.present)
                monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
                await here.deregister()
                assert not good.present and not bad.present


async def test_heartbeats_are_one_stream_which_is_opened_anew_where_the_router_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
    async with serving(HOSTS[0]) as (router, port), node(f"{HOSTS[0]}:{port}"):
        await eventually(lambda: router.beats > 5)
        assert router.streams == 1
        router.hangs_up = True
        await eventually(lambda: router.streams > 3)
        router.hangs_up = False
        before = router.beats
        await eventually(lambda: router.beats > before + 5 and router.load.routers == 1)


async def test_a_stream_that_ends_during_a_write_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """grpc.aio says INTERNAL then, whatever the call's status is; the next call says more."""
    internal = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, *(grpc.aio.Metadata(),) * 2)
    monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
    ended = []

    async def write(call: object, beat: object) -> None:
        ended.append(call)
        raise internal

    async with serving(HOSTS[0]) as (router, port), node(f"{HOSTS[0]}:{port}"):
        await eventually(lambda: router.beats > 1)
        with monkeypatch.context() as patched:
            patched.setattr("grpc.aio._call.StreamStreamCall.write", write)
            await eventually(lambda: len({*ended}) > 1)
        before = router.beats
        await eventually(lambda: router.beats > before and router.load.routers == 1)
    assert "trying again" not in caplog.text


async def test_a_router_s_siblings_are_registered_with_as_if_they_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node registers with those that a router names now; one that it does not name any more is
    kept while it answers."""
    monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
    monkeypatch.setattr(registration, "_RETRY_DELAY", 0.02)
    host = HOSTS[0]
    async with (
        serving(host) as (first, port),
        serving(host) as (second, other),
        serving(host) as (third, last),
    ):
        first.siblings = [other]
        second.siblings = [port, last]  # a sibling's siblings are not followed
        async with node(f"{host}:{port}") as here:
            await eventually(lambda: first.load.routers == second.load.routers == 2)
            assert not third.present
            first.siblings = [last]
            first.present.clear()  # it was started again
            await eventually(lambda: third.load.routers == 3)
            monkeypatch.setattr(registration, "_RPC_TIMEOUT", HASTY)
            second.hangs = True
            await eventually(lambda: f"{host}:{other}" not in here._kept)
            monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
            await here.deregister()
            assert not first.present and not third.present


async def test_a_name_stands_for_a_router_at_each_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come and go: one that has left the name is kept while it answers."""
    monkeypatch.setattr(registration, "_RETRY_DELAY", 0.02)
    known = {"routers": list(HOSTS[:2])}
    monkeypatch.setattr(registration, "_RPC_TIMEOUT", PATIENT)
    with names(monkeypatch, known):
        async with (
            serving(HOSTS[0]) as (first, port),
            serving(HOSTS[1], port) as (second, _),
            serving(HOSTS[2], port) as (third, _),
            node(f"routers:{port}") as here,
        ):
            await eventually(lambda: first.present and second.present)
            assert not third.present
            known["routers"] = []  # nothing is concluded from that
            beats = first.beats, second.beats
            await eventually(lambda: first.beats > beats[0] and second.beats > beats[1])
            known["routers"] = [HOSTS[0], HOSTS[2]]
            await eventually(lambda: third.present)
            beats = first.beats, second.beats
            await eventually(lambda: second.beats > beats[1])
            monkeypatch.setattr(registration, "_RPC_TIMEOUT", HASTY)
            second.hangs = True
            await eventually(lambda: f"{HOSTS[1]}:{port}" not in here._kept)
            assert here._kept.keys() == {f"{HOSTS[0]}:{port}", f"{HOSTS[2]}:{port}"}


async def test_the_certificate_of_a_router_names_the_name_not_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certs.write(tmp_path, ["routers"])
    files = {name: (tmp_path / f"{name}.pem").read_bytes() for name in ("key", "cert", "ca")}
    secured = grpc.ssl_server_credentials(
        [(files["key"], files["cert"])], files["ca"], require_client_auth=True
    )
    paths = {f"tls_{name}": str(tmp_path / f"{name}.pem") for name in files}
    own = Credentials.load("decode", "decode-1", TLSConfig(**paths), AuthConfig(), ())
    with names(monkeypatch, {"routers": list(HOSTS[:2])}):
        async with (
            serving(HOSTS[0], credentials=secured) as (first, port),
            serving(HOSTS[1], port, secured) as (second, _),
            node(f"routers:{port}", channels=own.channels()),
        ):
            await eventually(lambda: first.present and second.present)


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        (["::1", "127.0.0.1"], []),  # localhost: one host, dialled by its name
        (["10.0.0.1"], []),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"]),
        (["fd00::1", "10.0.0.1", "fd00::2"], ["fd00::1", "fd00::2"]),
    ],
)
def test_several_addresses_of_one_family_are_several_routers(
    addresses: list[str], found: list[str]
) -> None:
    assert all(map(ipaddress.ip_address, addresses))
    assert several(addresses) == found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("a:8002,", "nothing must be HOST:PORT"),
        ("a:8002,b", "b must be HOST:PORT"),
        ("a:8002, a:8002", "names a router twice"),
    ],
)
def test_routers_that_cannot_be(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NodeConfig(router=given)


async def test_routers_accept_models_of_many_layers(tmp_path: Path) -> None:
    """The description of their KV groups is longer than a router takes, and is cut such that
    models with other layers still differ."""
    found = []
    for layers in (64, 80, 81):
        config = json.loads((MODELS / "qwen2" / "config.json").read_text())
        windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 8}
        (tmp_path / "config.json").write_text(
            json.dumps({**config, **windows, "num_hidden_layers": layers, "layer_types": None})
        )
        model = ModelConfig(model=str(tmp_path), load_format="dummy")
        engine = EngineConfig(model=model, parallel=ParallelConfig(device="cpu"))
        made = DecodeNode(WorkerNodeConfig(node=NodeConfig(router="127.0.0.1:9"), engine=engine))
        made.address = "127.0.0.1:9"
        check_shape(info := made._info())
        found.append(info.fingerprint_parts["kv_groups"])
    assert len({*found}) == len(found)


def test_a_node_cannot_claim_replicas_without_end() -> None:
    """A router looks at each of them, at each scrape of its metrics."""
    info = pb.NodeInfo(
        node_id="p", role=pb.ROLE_PREFILL, address="h:1", data_parallel_size=2**32 - 1
    )
    with pytest.raises(InvalidRequest, match="at most 1024 replicas"):
        check_shape(info)
