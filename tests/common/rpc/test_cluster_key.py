"""The calls that each role may make: tokens of the cluster key, roles in certificates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from clock import Clock
from pdserve.cli.certs import HOSTS, write
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.shared import AuthConfig, TLSConfig
from pdserve.common.core.errors import (
    Blame,
    ClockSkew,
    ClusterAuthError,
    ConfigError,
    Overloaded,
    Unavailable,
)
from pdserve.common.core.host import is_loopback
from pdserve.common.node.registration import Registration
from pdserve.common.rpc import auth, receive
from pdserve.common.rpc.auth import CALLERS, TOKEN_KEY, ClusterKey
from pdserve.common.rpc.channels import Channels, Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import AuthInterceptor, GrpcServer
from pdserve.common.rpc.status import from_rpc_error
from pdserve.common.rpc.tls import TLS
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster import registry as registry_module
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.registry_service import (
    MAX_REASON_LENGTH,
    ElsewhereRegistry,
    RegistryService,
)
from pdserve.router.grpc.door import ClientDoor, Messages
from prefill_server import serving_prefill

KEY, OTHER = "of-this-cluster-alone", "of-another-cluster"
RUN, COMMIT = "/pdserve.v1.Prefill/Run", "/pdserve.v1.KVTransfer/Commit"
REGISTER = "/pdserve.v1.Registry/Register"
HERE = "10.0.0.3:5000"


# ---- tokens -------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def key(clock: Clock) -> ClusterKey:
    return ClusterKey(KEY, clock)


def token(clock: Clock, role: str = "router", method: str = RUN, keys: str = KEY) -> str:
    return ClusterKey(keys, clock).sign(role, f"{role}-1", method, HERE)


def test_a_token_says_who_calls(key: ClusterKey, clock: Clock) -> None:
    caller = key.check(token(clock), RUN, HERE)
    assert caller.is_node("router", "router-1")
    assert not caller.is_node("router", "router-2") and not caller.is_node("decode", "router-1")
    key.check(token(clock), RUN)  # a server that does not know where it is dialled


def test_no_key_or_another_one_is_refused_with_the_remedy(key: ClusterKey, clock: Clock) -> None:
    fields = token(clock).split(" ")
    others = ("v2", "prefill", "x", "h:1", "9", "0" * 16, "f" * 64)
    changed = [" ".join([*fields[:i], other, *fields[i + 1 :]]) for i, other in enumerate(others)]
    wrong = (None, "", "v1", "a b c d e f g", "ü " * 9, token(clock, keys=OTHER))
    for each in (*wrong, *changed):
        with pytest.raises(ClusterAuthError, match="give all roles the same --cluster-key"):
            key.check(each, RUN, HERE)


def test_an_old_token_is_refused_and_one_within_the_window_is_not(
    key: ClusterKey, clock: Clock
) -> None:
    made = [token(clock) for _ in range(3)]
    clock.time += 29
    key.check(made[0], RUN, HERE)
    clock.time += 2
    with pytest.raises(ClusterAuthError, match=r"31 s old.*set the clocks"):
        key.check(made[1], RUN, HERE)
    clock.time -= 62  # a host whose clock is ahead
    with pytest.raises(ClusterAuthError, match="is -31 s old"):
        key.check(made[2], RUN, HERE)


def test_a_token_is_good_once_for_one_method_of_one_server(key: ClusterKey, clock: Clock) -> None:
    made = token(clock)
    with pytest.raises(ClusterAuthError, match="another method"):
        key.check(made, "/pdserve.v1.KVTransfer/Retarget", HERE)
    with pytest.raises(ClusterAuthError, match=r"is for 10.0.0.3:5000, but this is 10.0.0.4"):
        key.check(made, RUN, "10.0.0.4:5000")
    key.check(made, RUN, HERE)
    for later in (0, 20):  # still within the window
        clock.time += later
        with pytest.raises(ClusterAuthError, match="used before"):
            key.check(made, RUN, HERE)
    early = ClusterKey(KEY, clock).sign("router", "router-1", RUN, HERE, ahead=120)
    with pytest.raises(ClockSkew):
        key.check(early, RUN, HERE)
    clock.time += 120  # it came before its time, and is not good later
    with pytest.raises(ClusterAuthError, match="used before"):
        key.check(early, RUN, HERE)


def test_a_token_of_a_host_whose_clock_is_ahead_is_good_once(key: ClusterKey, clock: Clock) -> None:
    made = ClusterKey(KEY, clock).sign("router", "router-1", RUN, HERE, ahead=25)
    key.check(made, RUN, HERE)
    for later in (20, 20, 14):  # still within the window
        clock.time += later
        with pytest.raises(ClusterAuthError, match="used before"):
            key.check(made, RUN, HERE)


def test_a_refusal_for_its_time_proves_what_the_server_s_clock_shows(
    key: ClusterKey, clock: Clock
) -> None:
    """To the one that made the call, by its key and its nonce."""
    mine = Clock()
    mine.time -= 120
    signer = ClusterKey(f"{KEY},{OTHER}", mine)
    made, another = (signer.sign("router", "router-1", RUN, HERE) for _ in range(2))
    with pytest.raises(ClockSkew) as caught:
        key.check(made, RUN, HERE)
    shown = caught.value.clock
    assert signer.clock_ahead(made, shown) == 120
    assert ClusterKey(f"{OTHER},{KEY}", mine).clock_ahead(made, shown) == 120
    assert signer.clock_ahead(another, shown) is None
    assert ClusterKey(OTHER, mine).clock_ahead(made, shown) is None
    later = f"{float(shown.split()[0]) + 60:.3f} {shown.split()[1]}"
    for forged in (later, "", "x", " ", "ü ü", shown[:-1]):
        assert signer.clock_ahead(made, forged) is None
    key.check(signer.sign("router", "router-1", RUN, HERE, ahead=120), RUN, HERE)


def test_remembered_tokens_are_bounded_in_number(
    key: ClusterKey, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_NONCES", 10)
    made = [token(clock) for _ in range(11)]
    for each in made:
        key.check(each, RUN, HERE)
    with pytest.raises(ClusterAuthError, match="used before"):
        key.check(made[-1], RUN, HERE)
    key.check(made[0], RUN, HERE)  # forgotten


@pytest.mark.parametrize("method", CALLERS)
def test_only_the_roles_of_the_table_may_call(key: ClusterKey, clock: Clock, method: str) -> None:
    for role in ("router", "prefill", "decode", "both", "client"):
        if role in CALLERS[method]:
            key.check(token(clock, role, method), method, HERE)
        else:
            with pytest.raises(ClusterAuthError, match=f"{role} may not call {method}"):
                key.check(token(clock, role, method), method, HERE)


def test_every_method_between_roles_is_in_the_table() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    methods = {f"/{each.full_name}/{m.name}" for each in services for m in each.methods}
    assert methods == CALLERS.keys()


def test_keys_are_exchanged_without_a_gap(clock: Clock) -> None:
    """Restart one role after another with `old,new`, then `new,old`, then `new`."""
    stages = [KEY, f"{KEY},{OTHER}", f"{OTHER},{KEY}", OTHER]
    for one, two in pairwise(stages):
        for signs, checks in ((one, two), (two, one)):
            ClusterKey(checks, clock).check(token(clock, keys=signs), RUN, HERE)


@pytest.mark.parametrize("short", ["", "short", f"{KEY},", f"{KEY},short"])
def test_a_key_that_can_be_guessed_is_refused(short: str) -> None:
    with pytest.raises(ConfigError, match=r"fewer than 16 characters.*openssl rand"):
        ClusterKey(short)


# ---- what a process may start with -------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA's certificate of all roles, and a client's."""
    folder = tmp_path_factory.mktemp("certs") / "certs"
    write(folder, HOSTS, client=True)
    return folder


@pytest.fixture(scope="module")
def by_role(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA's certificates of one role each, and a client's."""
    folder = tmp_path_factory.mktemp("by-role") / "certs"
    write(folder, HOSTS, client=True, by_role=True)
    return folder


def tls_config(folder: Path, prefix: str = "") -> TLSConfig:
    return TLSConfig(
        tls_cert=str(folder / f"{prefix}cert.pem"),
        tls_key=str(folder / f"{prefix}key.pem"),
        tls_ca=str(folder / "ca.pem"),
    )


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
        ("auto", False), ("prefill", False), ("", False),
    ],
)  # fmt: skip
def test_addresses_that_others_reach_need_a_key_tls_or_insecure(
    host: str, inside: bool, certs: Path
) -> None:
    assert is_loopback(host) is inside

    def load(tls: TLSConfig | None = None, **given: Any) -> Credentials:
        hosts = ("127.0.0.1", host)
        return Credentials.load("decode", "d", tls or TLSConfig(), AuthConfig(**given), hosts)

    load(cluster_key=KEY)
    load(tls_config(certs))
    load(insecure=True)
    if inside:
        load()
    else:
        with pytest.raises(ConfigError, match=r"give all roles the same --cluster-key.*--insecure"):
            load()


def test_a_certificate_without_the_role_is_told_at_start(certs: Path, by_role: Path) -> None:
    client = tls_config(certs, "client-")
    with pytest.raises(ConfigError, match="does not name the role decode"):
        Credentials.load("decode", "d", client, AuthConfig(), ())
    Credentials.load("decode", "d", client, AuthConfig(cluster_key=KEY), ())
    other = tls_config(by_role, "prefill-")
    for key in (None, KEY):
        with pytest.raises(ConfigError, match="does not name the role decode"):
            Credentials.load("decode", "d", other, AuthConfig(cluster_key=key), ())


# ---- the door of a server -----------------------------------------------------------------


class Prefill(pb_grpc.PrefillServicer):
    def __init__(self) -> None:
        self.served = 0

    async def Run(self, request: Any, context: Any) -> AsyncIterator[pb.PrefillEvent]:
        self.served += 1
        yield pb.PrefillEvent()


@asynccontextmanager
async def prefill_server(
    auth: AuthInterceptor, tls: TLS | None = None
) -> AsyncIterator[tuple[Prefill, str]]:
    servicer = Prefill()
    async with serving_prefill(servicer, auth, tls) as address:
        yield servicer, address


async def run(channels: Channels, address: str) -> str:
    """The error's code; empty: it was answered."""
    try:
        calls = pb_grpc.PrefillStub(channels.get(address)).Run(pb.PrefillRequest(), timeout=60)
        assert [event async for event in calls]
        return ""
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error, Blame.DECODE)
        assert typed.blame is Blame.DECODE
        if isinstance(typed, ClusterAuthError):
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        return typed.code
    finally:
        await channels.close()


def credentials(role: str, key: str | None = None, tls: TLSConfig | None = None) -> Credentials:
    config = AuthConfig(cluster_key=key)
    return Credentials.load(role, f"{role}-1", tls or TLSConfig(), config, ())


def skewed(role: str, seconds: float) -> Credentials:
    return Credentials(role, f"{role}-1", None, ClusterKey(KEY, lambda: time.time() + seconds))


@pytest.mark.parametrize("seconds", [-120, 120])
async def test_a_call_refused_for_its_time_is_made_again_by_the_server_s_clock(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with prefill_server(credentials("prefill", KEY).interceptor()) as (prefill, address):
        channels = skewed("router", seconds).channels()
        stub = pb_grpc.PrefillStub(channels.get(address))
        for _ in range(3):
            assert [each async for each in stub.Run(pb.PrefillRequest(), timeout=60)]
        assert prefill.served == 3
        assert await run(channels, address) == ""
    way = "behind" if seconds > 0 else "ahead of"
    assert caplog.text.count(f"is 120 s {way} this process's") == 1
    assert caplog.text.count("refused a call") == 1


async def test_a_server_that_does_not_prove_its_clock_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a call made a third time."""
    own = credentials("prefill", KEY)
    async with prefill_server(own.interceptor()) as (prefill, address):
        monkeypatch.setattr(ClusterKey, "clock_ahead", lambda *_: None)
        assert await run(skewed("router", 120).channels(), address) == "CLOCK_SKEW"
        monkeypatch.setattr(ClusterKey, "clock_ahead", lambda *_: 300.0)
        assert await run(skewed("router", 120).channels(), address) == "CLOCK_SKEW"
        assert prefill.served == 0


async def test_a_key_on_one_side_only_is_told_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with prefill_server(AuthInterceptor()) as (_, address):
        assert await run(credentials("router").channels(), address) == ""
        assert await run(credentials("router", KEY).channels(), address) == "CLUSTER_AUTH_FAILED"
    async with prefill_server(credentials("prefill", KEY).interceptor()) as (_, address):
        caplog.clear()
        for _ in range(20):
            assert await run(Channels(), address) == "CLUSTER_AUTH_FAILED"
    said = [each for each in caplog.messages if "refused a call" in each]
    assert 1 <= len(said) <= 5
    assert "give all roles the same --cluster-key" in said[0]


def question() -> Iterator[reflection_pb2.ServerReflectionRequest]:
    yield reflection_pb2.ServerReflectionRequest(list_services="")


async def test_health_is_for_all_and_the_contracts_are_for_roles() -> None:
    own = credentials("prefill", KEY)
    async with prefill_server(own.interceptor()) as (_, address):
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        token = ((TOKEN_KEY, ClusterKey(KEY).sign("router", "router-1", method, address)),)
        async with grpc.aio.insecure_channel(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            with refused(grpc.StatusCode.UNAUTHENTICATED, "has no token of the cluster key"):
                [each async for each in reflection.ServerReflectionInfo(question())]
            assert [
                each async for each in reflection.ServerReflectionInfo(question(), metadata=token)
            ]


async def test_a_token_is_good_for_the_message_it_was_made_for() -> None:
    """A relayed registration registers the node that signed it, not the relay."""
    async with registry_server() as (registry, address):
        key, mine = ClusterKey(KEY), pb.RegisterRequest(node=node("decode-1"), load=LOAD)
        theirs = pb.RegisterRequest(node=node("decode-1", address="6.6.6.6:1"), load=LOAD)

        def relayed() -> tuple[tuple[str, str], ...]:
            said = mine.SerializeToString()
            return ((TOKEN_KEY, key.sign("decode", "decode-1", REGISTER, "stranger:1", said)),)

        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.RegistryStub(channel)
            with refused(grpc.StatusCode.UNAUTHENTICATED, "token was made for another message"):
                await stub.Register(theirs, metadata=relayed())
            assert ClusterView(registry).describe()["nodes"] == []
            await stub.Register(mine, metadata=relayed())  # it may dial a name we do not know
            (known,) = ClusterView(registry).describe()["nodes"]
            assert known["address"] == "10.0.0.3:1"


async def test_a_certificate_that_names_its_role_needs_no_key(certs: Path) -> None:
    own = credentials("decode", tls=tls_config(certs))
    async with prefill_server(own.interceptor(), own.tls) as (prefill, address):
        assert await run(credentials("router", tls=tls_config(certs)).channels(), address) == ""
        # A client of the gRPC front has a certificate of the same CA.
        client = TLS.load(tls_config(certs, "client-"))
        assert await run(Channels(client), address) == "CLUSTER_AUTH_FAILED"
        assert prefill.served == 1


async def test_a_certificate_of_another_role_is_refused(by_role: Path) -> None:
    """Without a key, and with one: there a certificate that names no role is one of any."""
    server = credentials("prefill", tls=tls_config(by_role, "prefill-"))
    async with prefill_server(server.interceptor(), server.tls) as (prefill, address):
        for role, code in (("router", ""), ("decode", "CLUSTER_AUTH_FAILED")):
            channels = credentials(role, tls=tls_config(by_role, f"{role}-")).channels()
            assert await run(channels, address) == code
        assert prefill.served == 1
    server = credentials("prefill", KEY, tls_config(by_role, "prefill-"))
    async with prefill_server(server.interceptor(), server.tls) as (prefill, address):
        for pair, code in (
            ("router-", ""),
            ("client-", ""),
            ("decode-", "CLUSTER_AUTH_FAILED"),
        ):
            shown = TLS.load(tls_config(by_role, pair))
            router = Credentials("router", "router-1", shown, ClusterKey(KEY))
            assert await run(router.channels(), address) == code
        assert prefill.served == 2


# ---- registration -------------------------------------------------------------------------


def node(node_id: str = "d0", address: str = "10.0.0.3:1", **changes: Any) -> pb.NodeInfo:
    return pb.NodeInfo(
        **{
            "node_id": node_id, "role": pb.ROLE_DECODE, "address": address, "model": "tiny",
            "instance": "first", **changes,
        }
    )  # fmt: skip


LOAD = pb.NodeLoad(healthy=True, free_blocks=1, total_blocks=1)


@asynccontextmanager
async def registry_server(
    key: str | None = KEY, clock: Clock | None = None
) -> AsyncIterator[tuple[Registry, str]]:
    routing = RoutingConfig(heartbeat_interval=0.05)
    registry = Registry(routing, clock or Clock())
    server = GrpcServer(credentials("router", key).interceptor())
    server.add(
        pb.DESCRIPTOR.services_by_name["Registry"],
        pb_grpc.add_RegistryServicer_to_server,
        RegistryService(registry, "tiny", routing),
    )
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield registry, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def refused(code: grpc.StatusCode, says: str = "") -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError, match=says or None) as caught:
        yield
    assert caught.value.code() is code


async def test_a_node_registers_as_itself_alone() -> None:
    async with registry_server() as (registry, address):
        channels = credentials("decode", KEY).channels()
        stub = pb_grpc.RegistryStub(channels.get(address))
        await stub.Register(pb.RegisterRequest(node=node("decode-1"), load=LOAD))
        for other in (node("decode-2"), node("decode-1", role=pb.ROLE_PREFILL)):
            with refused(grpc.StatusCode.UNAUTHENTICATED, "the caller is not"):
                await stub.Register(pb.RegisterRequest(node=other, load=LOAD))
        await channels.close()
        (known,) = ClusterView(registry).describe()["nodes"]
        assert known["node_id"] == "decode-1" and "instance" not in known


@asynccontextmanager
async def heartbeats(
    address: str, signer: Channels | None = None, metadata: Any = ()
) -> AsyncIterator[Any]:
    """The stream of a node with this key, or of a stranger with this metadata."""
    channels = signer or Channels()
    stub = pb_grpc.RegistryStub(channels.get(address))
    yield stub.Heartbeats() if signer else stub.Heartbeats(metadata=metadata)
    await channels.close()


async def test_a_stream_of_heartbeats_has_one_token() -> None:
    async with registry_server() as (registry, address):
        channels = credentials("decode", KEY).channels()
        stub = pb_grpc.RegistryStub(channels.get(address))
        await stub.Register(pb.RegisterRequest(node=node("decode-1"), load=LOAD))
        beat = pb.HeartbeatRequest(node_id="decode-1", instance="first", load=LOAD)
        async with heartbeats(address, channels) as mine:
            for _ in range(3):
                await mine.write(beat)
                answer = await mine.read()
                assert answer.known and answer.heartbeat_interval_s == 0.05
            await mine.write(pb.HeartbeatRequest(node_id="decode-9"))
            assert not (await mine.read()).known
        register = "/pdserve.v1.Registry/Register"
        other = ClusterKey(KEY).sign("decode", "decode-1", register, address)
        for signer, metadata in (
            (None, ()),
            (None, ((TOKEN_KEY, other),)),
            (credentials("decode", OTHER).channels(), ()),
            (credentials("router", KEY).channels(), ()),  # no node
        ):
            async with heartbeats(address, signer, metadata) as forged:
                with refused(grpc.StatusCode.UNAUTHENTICATED):
                    await forged.read()
        (known,) = registry.nodes()
        assert known.load.healthy == LOAD.healthy


class Talks(pb_grpc.RegistryServicer):
    """A service whose calls are long and go both ways: it speaks first, counts what it hears, and
    says something of its own between two messages."""

    async def Heartbeats(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield pb.HeartbeatResponse(heartbeat_interval_s=0)
        heard = 0
        async for _ in requests:
            heard += 1
            yield pb.HeartbeatResponse(heartbeat_interval_s=heard)
            yield pb.HeartbeatResponse(known=True)


async def test_a_long_call_goes_both_ways_behind_authentication() -> None:
    server = GrpcServer(credentials("router", KEY).interceptor())
    contract = pb.DESCRIPTOR.services_by_name["Registry"]
    server.add(contract, pb_grpc.add_RegistryServicer_to_server, Talks())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    channels = credentials("decode", KEY).channels()
    call = pb_grpc.RegistryStub(channels.get(address)).Heartbeats()
    async with asyncio.timeout(60):
        assert (await call.read()).heartbeat_interval_s == 0
        for number in (1, 2, 3):
            await call.write(pb.HeartbeatRequest(node_id="d"))
            assert (await call.read()).heartbeat_interval_s == number
            assert (await call.read()).known
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    await channels.close()
    await server.stop(0)


async def test_a_stream_of_heartbeats_takes_no_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "SILENCE", 0.5)
    async with registry_server(None) as (_, address):
        async with heartbeats(address) as silent:
            with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "silent for"):
                await silent.read()
        async with grpc.aio.insecure_channel(address) as channel:
            for nonsense, why in ((b"\xff\xff", "not of the method"), (bytes(2**21), "at most")):
                call = channel.stream_stream("/pdserve.v1.Registry/Heartbeats")()
                await call.write(nonsense)
                with refused(grpc.StatusCode.INVALID_ARGUMENT, why):
                    await call.read()


def test_a_live_node_is_not_taken_over_and_one_that_comes_back_is_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    registry = Registry(RoutingConfig(heartbeat_timeout=5), clock)
    registry.register(node(), LOAD)
    with pytest.raises(Unavailable) as caught:
        registry.register(node(address="6.6.6.6:1", instance="fake"), LOAD)
    assert caught.value.code == "NODE_ID_TAKEN"
    assert (
        "refused to register d0 at 6.6.6.6:1: a live node has this id, at 10.0.0.3:1" in caplog.text
    )
    # A caller that does not know its instance cannot keep it alive, report or remove it.
    assert not registry.heartbeat("d0", pb.NodeLoad(healthy=False, reason="slander"), "fake")
    registry.deregister("d0", "fake")
    (old,) = ClusterView(registry).candidates(pb.ROLE_DECODE).by_load()
    assert old.info.address == "10.0.0.3:1"
    assert registry.heartbeat("d0", LOAD, "first")
    ended: list[str] = []
    old.on_lost.add(lambda error: ended.append(error.code))
    registry.register(node(instance="second"), LOAD)  # at its address: it was restarted
    assert ended == ["PEER_LOST"]
    assert "is replaced by a new process" in caplog.text
    clock.time += 5.1  # it is gone
    registry.register(node(address="10.0.0.9:1", instance="third"), LOAD)
    (new,) = ClusterView(registry).candidates(pb.ROLE_DECODE).by_load()
    assert new.info.address == "10.0.0.9:1"
    registry.deregister("d0", "third")
    assert ClusterView(registry).describe()["nodes"] == []


def test_registrations_are_bounded_in_number_and_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    registry = Registry(RoutingConfig(heartbeat_timeout=50), clock)
    for index in range(registry_module.NEW_NODES_BURST):
        registry.register(node(f"d{index}"), LOAD)
    with pytest.raises(Overloaded, match="new nodes a second"):
        registry.register(node("one-more"), LOAD)
    registry.register(node("d0"), LOAD)  # who is known is not counted
    clock.time += 1.01 / registry_module.NEW_NODES_PER_S
    registry.register(node("one-more"), LOAD)
    monkeypatch.setattr(
        registry_module, "MAX_NODES", len(ClusterView(registry).describe()["nodes"])
    )
    clock.time += 10
    with pytest.raises(Overloaded, match="nodes are registered"):
        registry.register(node("yet-another"), LOAD)


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"node_id": name} for name in ("x" * 65, "d0\nINFO forged", "d\x1b[31m")),
    *({"address": text} for text in ("no-port", "h\n:1", f"{'h' * 300}:1")),
    {"fingerprint": "f" * 129},
    {"fingerprint_parts": {str(i): "" for i in range(65)}},
    {"fingerprint_parts": {"weights": "w" * 257}},
    *({"kv_connectors": names} for names in (["tcp"] * 17, ["c" * 129])),
    {"host": "h" * 256},
    {"metrics_address": "m" * 262},
    {"instance": "i" * 65},
]


async def test_invalid_node_descriptions_are_refused() -> None:
    async with registry_server(None) as (registry, address):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.RegistryStub(channel)
            for changes in IMPOSSIBLE:
                with refused(grpc.StatusCode.INVALID_ARGUMENT):
                    await stub.Register(pb.RegisterRequest(node=node(**changes)))
            long = pb.NodeLoad(reason="\x1b[2J" + "r" * 5000)
            await stub.Register(pb.RegisterRequest(node=node(), load=long))
        (described,) = ClusterView(registry).describe()["nodes"]
        assert described["reason"].isprintable()
        assert len(described["reason"]) < MAX_REASON_LENGTH + 50


async def said(
    address: str, channels: Channels, caplog: pytest.LogCaptureFixture, **options: Any
) -> str:
    """The first thing a node that tries to register there says about it."""
    registration = Registration(address, node("decode-1"), lambda _: LOAD, channels, **options)
    task = asyncio.create_task(registration.run())
    caplog.clear()
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
    task.cancel()
    await channels.close()
    return caplog.messages[0]


async def test_a_node_says_why_it_cannot_register(
    certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = credentials("decode", tls=tls_config(certs))
    async with registry_server() as (_, address):
        text = await said(address, credentials("decode", OTHER).channels(), caplog)
        assert "give all roles the same --cluster-key" in text
    async with prefill_server(own.interceptor(), own.tls) as (_, address):
        text = await said(address, Channels(), caplog, over_tls=False)
        assert "it uses TLS, but this role does not: give all roles --tls-cert" in text
    async with prefill_server(AuthInterceptor()) as (_, address):
        text = await said(address, own.channels(), caplog, over_tls=True)
        assert "it does not use TLS, but this role does" in text
    server = GrpcServer(ClientDoor(APIKeys(), Messages(2**18), lambda *_: None))
    registry = Registry(RoutingConfig(), Clock())
    server.server.add_generic_rpc_handlers((ElsewhereRegistry(registry),))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    text = await said(f"127.0.0.1:{port}", credentials("decode").channels(), caplog)
    assert "give the router's --registry-port" in text
    assert all("--registry-port" in reason for reason, *_ in registry.refusals.items())
    assert list(registry.refusals.items()), "an operator sees it in /v1/cluster"
    await server.stop(0)
