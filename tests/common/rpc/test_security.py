"""The peers that are let in: TLS between the roles, API keys, strangers at the KV port."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
import torch
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from yarl import URL

from connector_ranks import ID, RECT, SINK_IDS, Rank, ranks, submit, submit_to
from fakes_pipeline import FakeGenerator, byte_level_folder, served_model
from pdserve.cli.certs import HOSTS, write
from pdserve.cli.main import main
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.config.router import RouterConfig, ServerConfig
from pdserve.common.config.shared import TLSConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, InvalidRequest, Unauthenticated
from pdserve.common.core.parameters import MAX_CHOICES, MAX_TOKENS_NAMED
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.node.model_facts import check_job
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.rpc.tls import TLS
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import BlockRun, Failed, Landed, Sent, SinkTransfer
from pdserve.kv_transfer.connectors.base import handshake, server
from pdserve.kv_transfer.connectors.base.handshake import recv_frame, send_frame
from pdserve.kv_transfer.connectors.base.sockets import TLSPipe
from pdserve.kv_transfer.connectors.tcp import Endpoint, Options, TCPTransport
from pdserve.kv_transfer.control.ticket import new_transfer_id
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.layout import Rect
from pdserve.kv_transfer.selection import connector_options, rank_config
from pdserve.router.api.app_state import AppState
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster.node import ROLE_NAMES
from pdserve.router.grpc.door import ClientDoor, Messages
from pdserve.router.grpc.service import InferenceServicer
from pdserve.router.http.app import make_app
from pdserve.router.http.server import HTTPServer, https_context
from waiting import wait_until

FILL = struct.unpack("=f", b"\x3f" * 4)[0]


def files(folder: Path) -> dict[str, str]:
    return {f"tls_{name}": str(folder / f"{name}.pem") for name in ("cert", "key", "ca")}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two CAs, `ours` and `theirs`, with a certificate each, and one that names another host."""
    folder = tmp_path_factory.mktemp("certs")
    write(folder / "ours", HOSTS)
    write(folder / "theirs", HOSTS)
    write(folder / "elsewhere", ["elsewhere.test"])
    return folder


def tls(folder: Path) -> TLS:
    loaded = TLS.load(TLSConfig(**files(folder)))
    assert loaded is not None
    return loaded


# ---- pdserve certs ------------------------------------------------------------------------


def test_certs_makes_files_and_prints_their_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "certs"
    given = ["decode", "10.1.2.3", "*.decode.example"]
    assert main(["certs", str(folder), *(f"--host={host}" for host in given)]) == 0
    flags = capsys.readouterr().out.split()
    config = parse(WorkerNodeConfig, prog="x", argv=flags, environ={})
    assert TLS.load(config.tls) == TLS(*(folder / f"{n}.pem" for n in ("cert", "key", "ca")))
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.glob("*.pem")) == ["ca.pem", "cert.pem", "key.pem"]
    assert (folder / ".gitignore").read_text() == "*.pem\n"  # no key is committed by mistake
    cert = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = [str(getattr(name, "value", name)) for name in names]
    roles = [f"pdserve://role/{role}" for role in ("router", *ROLE_NAMES.values())]
    hosts = ["localhost", "127.0.0.1", "::1", *given]
    assert sorted(found) == sorted(hosts + roles), "of every role that registers, and the router"


def test_certs_makes_a_pair_for_each_role_and_renews_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--by-role", "--keep-ca"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    roles = ["router", *ROLE_NAMES.values()]

    def named() -> list[frozenset[str]]:
        loaded = [
            TLS.load(parse(WorkerNodeConfig, prog="x", argv=flags, environ={}).tls)
            for flags in lines
        ]
        return [each.roles() for each in loaded if each is not None]

    assert sorted(named(), key=sorted) == sorted(map(frozenset, ([r] for r in roles)), key=sorted)
    before = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    assert main(["certs", str(folder), "--by-role", "--renew"]) == 0
    after = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    kept = {name for name in before if before[name] == after[name]}
    assert after.keys() == before.keys() and kept == {"ca.pem", "ca-key.pem"}
    assert sorted(named(), key=sorted) == sorted(map(frozenset, ([r] for r in roles)), key=sorted)


def test_certs_leaves_existing_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for argv, says in (
        ([str(tmp_path)], "File exists; name another folder"),
        ([str(tmp_path / "b"), "--host=a b"], "neither a host name nor an IP address"),
        ([str(tmp_path / "b"), "--host=a.*"], "neither a host name nor an IP address"),
    ):
        assert main(["certs", *argv]) == 2
        assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- the files ----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("config", [WorkerNodeConfig, RouterConfig, ClusterConfig])
def test_all_three_files_or_none(
    config: type, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={name}" for name in files(Path()) if name != missing]
    with pytest.raises(SystemExit):
        parse(config, prog="x", argv=flags, environ={})
    assert "give all three or none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tls_key": "/nowhere.pem"}, "--tls-key /nowhere.pem cannot be read: No such file"),
        ({"tls_cert": "/nowhere.pem"}, "--tls-cert /nowhere.pem cannot be read: No such file"),
        ({"tls_ca": "/nowhere.pem"}, "--tls-ca /nowhere.pem: No such file"),
        ({"tls_key": "theirs/key.pem"}, "are not a certificate and its unencrypted key"),
        ({"tls_cert": "ours/key.pem"}, "are not a certificate and its unencrypted key"),
        ({"tls_ca": "ours/key.pem"}, "no certificate or crl found"),
        ({"tls_ca": "theirs/ca.pem"}, "would reject --tls-cert"),
    ],
)
def test_files_that_do_not_fit_are_told_at_start(
    certs: Path, changes: dict[str, str], says: str
) -> None:
    changed = {name: str(certs / path) for name, path in changes.items()}
    with pytest.raises(ConfigError, match=says):
        TLS.load(TLSConfig(**{**files(certs / "ours"), **changed}))


def test_an_expired_certificate_is_told_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.cli.certs.VALID", timedelta(minutes=-1))
    write(tmp_path / "old", HOSTS)
    with pytest.raises(ConfigError, match="certificate has expired"):
        TLS.load(TLSConfig(**files(tmp_path / "old")))


# ---- gRPC between the roles ---------------------------------------------------------------


@contextlib.asynccontextmanager
async def grpc_server(tls: TLS | None) -> AsyncIterator[int]:
    server = GrpcServer()
    port = server.bind("127.0.0.1", 0, tls)
    await server.start()
    await server.set_healthy(True)
    yield port
    await server.stop(0)


async def is_answered(address: str, tls: TLS | None) -> bool:
    channels = Channels(tls)
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return True
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return False
    finally:
        await channels.close()


async def test_grpc_answers_certificates_of_its_ca_and_is_dialled_by_its_name(certs: Path) -> None:
    ours, theirs, elsewhere = (tls(certs / name) for name in ("ours", "theirs", "elsewhere"))
    async with grpc_server(ours) as port:
        assert await is_answered(f"127.0.0.1:{port}", ours)
        assert await is_answered(f"localhost:{port}", ours)
        assert not await is_answered(f"127.0.0.1:{port}", None)
        assert not await is_answered(f"127.0.0.1:{port}", theirs)
        # Of the right CA as far as the client goes, but it shows no certificate.
        ca = grpc.ssl_channel_credentials((certs / "ours" / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", ca) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=60
                )
    async with grpc_server(elsewhere) as port:
        assert not await is_answered(f"127.0.0.1:{port}", elsewhere)


# ---- API keys -----------------------------------------------------------------------------


def test_any_of_the_keys_opens() -> None:
    keys = APIKeys("first, second")
    for good in ("Bearer first", "bearer second", "Bearer  second "):
        keys.check(good)
    wrong = ("", "Bearer", "Bearer ", "Bearer third", "Basic first", "first", "Bearer \udc80")
    for bad in (None, *wrong):
        with pytest.raises(Unauthenticated):
            keys.check(bad)
    APIKeys(None).check(None)
    for empty in ("", "a,", ",", " "):
        with pytest.raises(ConfigError, match="empty key"):
            APIKeys(empty)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


@contextlib.asynccontextmanager
async def http_server(
    generator: FakeGenerator, keys: APIKeys, config: ServerConfig | None = None
) -> AsyncIterator[int]:
    serving = AppState(pipeline=generator, served=served_model(generator.tokenizer), keys=keys)
    app = make_app(serving, CollectorRegistry(), 1 << 20)
    context = https_context(config or ServerConfig())
    server = await HTTPServer.start(app, "127.0.0.1", 0, context)
    try:
        yield server.port
    finally:
        await server.stop(0)


CALLS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/models": None,
    "/v1/models/tiny": None,
    "/v1/cluster": None,
}


async def test_http_needs_the_key_but_for_probes(tokenizer: Tokenizer) -> None:
    server = http_server(FakeGenerator(tokenizer), APIKeys("secret"))
    async with server as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        for path, body in CALLS.items():
            call = session.get if body is None else session.post
            options: dict[str, Any] = {} if body is None else {"json": body}
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                async with call(url + path, headers=headers, **options) as response:
                    assert response.status == 401, path
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    error = (await response.json())["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["type"] == "authentication_error"
                    assert error["code"] == "invalid_api_key"
                    assert "secret" not in await response.text()
            good = {"Authorization": "Bearer secret"}
            async with call(url + path, headers=good, **options) as response:
                assert response.status == 200, path
        for path in ("/health", "/ready", "/metrics", "/version"):
            async with session.get(url + path) as response:
                assert response.status == 200
        # Another spelling of a path is no way around.
        for path in ("/%76%31/models", "//v1/models", "/health/../v1/models", "/nowhere"):
            async with session.get(URL(url + path, encoded=True)) as response:
                assert response.status in (401, 404)
        async with session.options(url + "/v1/completions") as response:
            assert response.status == 204  # browsers ask without the key


@pytest.mark.parametrize("salted", [False, True])
async def test_by_option_each_key_has_cached_prompts_of_its_own(
    tokenizer: Tokenizer, salted: bool
) -> None:
    generator = FakeGenerator(tokenizer)
    server = http_server(generator, APIKeys("first, second", salted=salted))
    async with server as port, aiohttp.ClientSession() as session:
        for key in ("first", "second", "first"):
            headers = {"Authorization": f"Bearer {key}"}
            for path in ("/v1/completions", "/v1/chat/completions"):
                url = f"http://127.0.0.1:{port}{path}"
                async with session.post(url, json=CALLS[path], headers=headers) as response:
                    assert response.status == 200
    salts = [request.cache_salt for request in generator.requests]
    assert salts[:2] == salts[4:] and len(set(salts)) == (2 if salted else 1)


@contextlib.asynccontextmanager
async def grpc_front(tokenizer: Tokenizer, keys: APIKeys) -> AsyncIterator[grpc.aio.Channel]:
    serving = AppState(pipeline=FakeGenerator(tokenizer), served=served_model(tokenizer), keys=keys)
    server = GrpcServer(ClientDoor(keys, Messages(2**18), serving.refused))
    server.add(
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceServicer(serving),
    )
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_grpc_needs_the_key_for_inference_alone(tokenizer: Tokenizer) -> None:
    async with grpc_front(tokenizer, APIKeys("secret")) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="a")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [each async for each in stub.Generate(request, metadata=metadata)]
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", "Bearer secret"),)
        assert (await stub.GetModel(inference_pb2.GetModelRequest(), metadata=key)).id == "tiny"
        assert [each async for each in stub.Generate(request, metadata=key)]
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


# ---- HTTPS --------------------------------------------------------------------------------


async def test_https(tokenizer: Tokenizer, certs: Path) -> None:
    folder = certs / "ours"
    config = ServerConfig(
        ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem")
    )
    trust = ssl.create_default_context(cafile=folder / "ca.pem")
    server = http_server(FakeGenerator(tokenizer), APIKeys(), config)
    async with server as port, aiohttp.ClientSession() as session:
        async with session.get(f"https://127.0.0.1:{port}/health", ssl=trust) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ssl_certfile": "/nowhere.pem"}, "--ssl-certfile /nowhere.pem cannot be read"),
        ({"ssl_keyfile": "theirs/key.pem"}, "--ssl-certfile .* and --ssl-keyfile .*theirs"),
        ({"ssl_keyfile": None}, "are not a certificate and its unencrypted key"),
        ({"ssl_certfile": None}, "--ssl-keyfile needs --ssl-certfile"),
    ],
)
def test_bad_https_files(certs: Path, changes: dict[str, str | None], says: str) -> None:
    given: dict[str, str | None] = {"ssl_certfile": "ours/cert.pem", "ssl_keyfile": "ours/key.pem"}
    paths = {name: path and str(certs / path) for name, path in (given | changes).items()}
    with pytest.raises(ConfigError, match=says):
        https_context(ServerConfig(**paths))  # type: ignore[arg-type]


# ---- the KV port --------------------------------------------------------------------------


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    with ranks() as made:
        yield made


def send(source: Rank, sink: Rank, transfer_id: bytes = ID) -> None:
    submit(source, sink, transfer_id)
    source.connector.ready(transfer_id, BlockRun(0, 4), (0, 1, 2, 3), True)


def check_healthy(sink: Rank, source: Rank, transfer_id: bytes = ID) -> None:
    sink.connector.accept(SinkTransfer(transfer_id, 1, 0, SINK_IDS))
    send(source, sink, transfer_id)
    sink.expect(Landed)
    source.expect(Sent)
    assert (sink.cache[:, :, list(SINK_IDS)] == 1.0).all()


def connect(sink: Rank) -> socket.socket:
    """Whatever the endpoint says about TLS."""
    where = msgspec.msgpack.decode(sink.connector.endpoint(), type=Endpoint)
    return socket.create_connection((where.host, where.port), 10)


def test_given_up_inside_tls_nothing_encrypted_gets_into_the_blocks(
    rank: Callable[..., Rank], certs: Path
) -> None:
    sink = rank(options=files(certs / "ours"))
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    with greeted(sink, files(certs / "ours")) as pipe:
        payload = data(sink, 0, 4)
        pipe.sendall(payload[:200])
        wait_until(lambda: bool(sink.cache.any()))
        before = sink.cache.clone()
        started = time.monotonic()
        sink.connector.quiesce(ID)
        assert time.monotonic() - started < 10.0
        pipe.sendall(payload[200:])  # goes beside the blocks
        other = ID[::-1]
        sink.connector.accept(SinkTransfer(other, 1, 0, (0, 1)))
        pipe.sendall(data(sink, 0, 2, other))
        sink.expect(Landed)
    blocks = list(SINK_IDS)
    assert torch.equal(sink.cache[:, :, blocks], before[:, :, blocks])
    assert set(sink.cache.unique().tolist()) <= {0.0, FILL}


@pytest.mark.parametrize(
    ("of_sink", "of_source", "code", "says"),
    [
        ("ours", "theirs", "CONNECT_FAILED", ""),
        ("ours", "elsewhere", "CONNECT_FAILED", ""),
        ("ours", "", "TLS_MISMATCH", "the decode node takes KV over TLS"),
        ("", "ours", "TLS_MISMATCH", "takes KV over plain TCP and the prefill node sends it over"),
    ],
)
def test_a_source_without_our_certificate_is_refused(
    rank: Callable[..., Rank], certs: Path, of_sink: str, of_source: str, code: str, says: str
) -> None:
    own, others = (files(certs / name) if name else {} for name in (of_sink, of_source))
    sink, stranger = rank(options=own), rank(options=others, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    send(stranger, sink)
    failed = stranger.expect(Failed)
    assert failed.code == code and says in failed.message
    if not of_source:  # a node that is misconfigured; a stranger speaks all the same
        with connect(sink) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(Frame(FrameKind.HELLO, nbytes=4).encode() + b"same")
            assert b"pdKV" not in sock.recv(64)
    sink.connector.quiesce(ID)
    assert not sink.cache.any()
    source = rank(options=own, fill=1.0)
    check_healthy(sink, source, b"transfer-id-0002")
    check_healthy(sink, source, b"transfer-id-0003")  # on the connection that was kept


def test_a_pipe_that_was_cut_off_takes_no_plain_text(certs: Path) -> None:
    ours, theirs = socket.socketpair()
    made = tls(certs / "ours")
    with ThreadPoolExecutor(1) as thread:
        dialling = thread.submit(
            made.client_context().wrap_socket, theirs, server_hostname="localhost"
        )
        pipe = TLSPipe(made.server_context().wrap_socket(ours, server_side=True))
        with dialling.result() as peer:
            assert pipe.alive()
            socket.socket.send(peer, b"not encrypted at all")
            pipe.interrupt()
            with pytest.raises(OSError):
                pipe.recv_bytes(10)
    pipe.close()


def test_kv_is_encrypted_where_grpc_is_or_the_log_says_so(
    certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = TLSConfig(**files(certs / "ours"))

    def given(connectors: dict[str, dict[str, Any]], tls: TLSConfig) -> dict[str, Any]:
        made = msgspec.msgpack.decode(rank_config(connectors, "f", tls, source=True))
        return dict(made["connectors"])

    assert given({"shm": {}, "tcp": {"streams": 2}}, node) == {
        "shm": {}, "tcp": {"streams": 2, **files(certs / "ours")},
    }  # fmt: skip
    assert given({"tcp": {}}, TLSConfig()) == {"tcp": {}}
    assert not caplog.messages
    assert given({"tcp": {"tls": False}}, node) == {"tcp": {}}
    assert given({"nccl": {}}, node) == {"nccl": {}}
    assert [text.split()[-3] for text in caplog.messages] == ["tcp", "nccl"]


def test_kv_options_for_tls(certs: Path) -> None:
    node = TLSConfig(**files(certs / "ours"))
    assert connector_options({"tls": True, "a": 1}, node) == {**files(certs / "ours"), "a": 1}
    for given, config in (({"tls": True}, TLSConfig()), ({"tls": "yes"}, node)):
        with pytest.raises(ConfigError, match="true needs --tls-cert"):
            connector_options(given, config)
    with pytest.raises(ConfigError, match="give all three or none"):
        TCPTransport(Options(tls_cert="cert.pem"))


def is_closed(sock: socket.socket, within: float = 30.0) -> bool:
    sock.settimeout(within)
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def test_a_sink_that_does_not_greet_back_is_given_up(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "GREETING_S", 0.2)
    deaf, source = TCPTransport(Options()).listen("127.0.0.1"), rank()
    submit_to(source, deaf.endpoint)
    failed = source.expect(Failed)
    deaf.close()
    assert (failed.code, failed.retryable) == ("CONNECT_FAILED", True)
    assert "no greeting within 0.2 s" in failed.message


def test_connections_are_bounded_and_a_lack_of_threads_leaves_the_port_open(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of sources that have said who they are; `test_connectors_guarded.py` has the
    others."""
    monkeypatch.setattr(server, "MAX_PIPES", 2)
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    sink, start, before = rank(), threading.Thread.start, num_served()
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(greeted(sink)) for _ in range(3)]
        late = stack.enter_context(connect(sink))
        assert is_closed(late)
        assert sink.connector.counts["refused_connection"] == 1
        sources[0].close()
        wait_until(lambda: num_served() <= before + 2)
        check_healthy(sink, rank(fill=1.0))
    wait_until(lambda: num_served() <= before + 1)  # that of the rank, which stays

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kv-sink":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with connect(sink) as late:
            assert is_closed(late)
    assert sink.connector.counts["refused_connection"] == 2
    check_healthy(sink, rank(fill=1.0), b"transfer-id-0002")


def num_served() -> int:
    """Returns the number of connections that sinks of this process serve."""
    return sum(thread.name == "kv-sink" for thread in threading.enumerate())


@contextlib.contextmanager
def greeted(sink: Rank, options: Mapping[str, str] | None = None) -> Iterator[socket.socket]:
    """A peer that the sink has welcomed."""
    pipe = TCPTransport(Options(**(options or {}))).dial(sink.connector.endpoint())
    send_frame(pipe, Frame(FrameKind.HELLO), b"same")
    assert recv_frame(pipe).kind is FrameKind.WELCOME
    try:
        yield pipe.sock
    finally:
        pipe.close()


def data(sink: Rank, first: int, count: int, transfer_id: bytes = ID) -> bytes:
    nbytes = piece_nbytes(sink.cache, RECT, count)
    frame = Frame(FrameKind.DATA, transfer_id, 1, RECT, first, count, nbytes)
    confirm = Frame(FrameKind.CONFIRM, transfer_id, 1, RECT, first, 1)
    return frame.encode() + b"\x3f" * nbytes + confirm.encode()


def wait_for_count(sink: Rank, name: str, value: int) -> None:
    wait_until(lambda: sink.connector.counts[name] >= value)


def test_a_piece_is_its_first_connection_s(rank: Callable[..., Rank]) -> None:
    """Even who knows the transfer's id neither writes into its blocks nor ends it."""
    sink = rank()
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    begin = Frame(FrameKind.BEGIN, ID, 1, RECT).encode()
    with greeted(sink) as owner, greeted(sink) as thief:
        owner.sendall(begin)
        sink.events.get(timeout=30.0)  # the progress that BEGIN is
        thief.sendall(begin + data(sink, 0, 4))
        wait_for_count(sink, "foreign_frame", 2)
        assert not sink.cache.any()
        # A part of the piece is taken too: a peer that tries to write it is disconnected.
        thief.sendall(Frame(FrameKind.BEGIN, ID, 1, Rect(0, 1, 0, 1)).encode())
        assert is_closed(thief)
        owner.sendall(data(sink, 0, 4))
        sink.expect(Landed)
        # What has landed is not written again.
        with greeted(sink) as another:
            another.sendall(data(sink, 0, 4))
            owner.sendall(data(sink, 0, 4))
            wait_for_count(sink, "duplicate_frame", 1)
            wait_for_count(sink, "foreign_frame", 3)
        sink.connector.release(ID)
        owner.sendall(data(sink, 0, 4))
        wait_for_count(sink, "unknown_frame", 1)


def test_transfer_ids_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("secrets.token_bytes", lambda size: asked.append(size) or b"r" * size)
    assert new_transfer_id() == b"r" * 16
    assert asked == [16]


# ---- limits -------------------------------------------------------------------------------


UNBOUNDED: list[tuple[str, Any]] = [
    ("n", 129),
    ("stop", ["a" * i for i in range(1, 258)]),
    ("logit_bias", dict.fromkeys(range(MAX_TOKENS_NAMED + 1), 0.0)),
    ("logit_bias", {1: float("nan")}),
    ("stop_token_ids", [1] * (MAX_TOKENS_NAMED + 1)),
    ("allowed_token_ids", [1] * (MAX_TOKENS_NAMED + 1)),
    ("allowed_token_ids", [10**6]),
    *(("bad_words", words) for words in (["x"] * 129, ["x" * 65], [""])),
    ("bad_words_token_ids", [inference_pb2.TokenIds(ids=[1])] * 257),
    *(
        ("bad_words_token_ids", [inference_pb2.TokenIds(ids=ids)])
        for ids in ([1] * 65, [], [10**6])
    ),
    ("repetition_penalty", 1e-39),
    ("seed", 2**64 - 1),
]


async def test_grpc_bounds(tokenizer: Tokenizer) -> None:
    async with grpc_front(tokenizer, APIKeys()) as channel:
        for param, value in UNBOUNDED:
            sampling = inference_pb2.SamplingParams(**{param: value})
            request = inference_pb2.GenerateRequest(text="a", sampling=sampling)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [each async for each in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (param, value)
            assert dict(caught.value.trailing_metadata() or ())["pdserve-param"] == param


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_token_ids": (1,) * 10}, "maximum context length"),
        ({"choices": (Choice(0, (1,) * 7),)}, "maximum context length"),
        ({"prompt_token_ids": (1, 50)}, "token id 50"),
        ({"choices": (Choice(0, (60,)),)}, "token id 60"),
        ({"choices": (Choice(),) * (MAX_CHOICES + 1)}, "choices"),
        ({"sampling": SamplingParams(stop_token_ids=(80,))}, "token id 80"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(logit_bias={1: float("inf")})}, "logit_bias"),
        ({"sampling": SamplingParams(min_tokens=17)}, "min_tokens 17 exceeds"),
        ({"sampling": SamplingParams(min_tokens=1, stop_token_ids=tuple(range(50)))}, "every"),
        ({"choices": (Choice(2**32 - 1),)}, "choice"),
    ],
)
def test_a_node_does_not_trust_a_job(changes: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": (1, 2, 3),
        "sampling": SamplingParams(),
    }
    check_job(GenerateJob(**good), 50, 10)
    with pytest.raises(InvalidRequest, match=says):
        check_job(GenerateJob(**{**good, **changes}), 50, 10)
