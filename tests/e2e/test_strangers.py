"""A cluster with a key, and strangers at its ports: they get no prompt, no token, no node's place.

Without the key the same things work, which shows that the strangers here know how."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest

from callers import HTTPCaller
from pdserve.common.core.request import GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc.auth import TOKEN_KEY, ClusterKey
from pdserve.common.rpc.convert import job_to_pb
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.kv_transfer.frame import Frame, FrameKind
from warm import WarmCluster

MODEL = "mistral"
KEY = "known-to-this-cluster"
PROMPT = tuple(range(5, 45))
FAKES = 500
CROWD = 1100  # connections
STEADY = {"heartbeat_timeout": 30}  # seconds: fakes send none, and a live node's may be late


@pytest.fixture(scope="module")
def guarded() -> Iterator[WarmCluster]:
    router = {"cluster_key": KEY, **STEADY}
    with WarmCluster(MODEL, router=router, cluster_key=KEY, kv_connector="tcp") as cluster:
        yield cluster
        cluster.wait_idle()
        assert KEY not in cluster.log()


@pytest.fixture(scope="module")
def unguarded() -> Iterator[WarmCluster]:
    routing = {"migration_limit": 0, "request_timeout": 20, "queue_timeout": 20, **STEADY}
    with WarmCluster(MODEL, 0, 0, router=routing) as cluster:
        cluster.wait_for(lambda: cluster.get("/health").ok)
        yield cluster


class FakeDecode(pb_grpc.DecodeServicer):
    """A stranger's decode node: it keeps the prompts it is given."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    async def Run(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        self.prompts.append(tuple(request.job.prompt_token_ids))
        await context.abort(grpc.StatusCode.INTERNAL, "gotcha")
        return pb.DecodeResponse()

    async def Events(self, request: Any, context: Any) -> AsyncIterator[pb.StepEvents]:
        await asyncio.Event().wait()
        yield pb.StepEvents()


@contextmanager
def fake_decode() -> Iterator[tuple[FakeDecode, str]]:
    """Serves on a thread of its own."""
    fake, ready = FakeDecode(), threading.Event()
    loop = asyncio.new_event_loop()
    ports: list[int] = []

    async def serve() -> grpc.aio.Server:
        server = grpc.aio.server()
        pb_grpc.add_DecodeServicer_to_server(fake, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        return server

    def run() -> None:
        server = loop.run_until_complete(serve())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.stop(0))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield fake, f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


LOAD = pb.NodeLoad(healthy=True, free_blocks=100_000, total_blocks=100_000,
                   most_free_blocks=100_000)  # fmt: skip


def info(node_id: str, address: str, role: int = pb.ROLE_DECODE, **like: Any) -> pb.NodeInfo:
    given = {"model": MODEL, "kv_connectors": ["shm", "tcp"], "fingerprint": "f", **like}
    return pb.NodeInfo(node_id=node_id, role=role, address=address, **given)


def register(cluster: WarmCluster, node: pb.NodeInfo, key: str | None = None) -> str:
    """Returns the name of the status of a registration with `key`."""
    role = "decode" if node.role == pb.ROLE_DECODE else "prefill"
    method, address = "/pdserve.v1.Registry/Register", cluster.registry
    request = pb.RegisterRequest(node=node, load=LOAD)
    token = []
    if key:
        said = request.SerializeToString()
        token = [(TOKEN_KEY, ClusterKey(key).sign(role, node.node_id, method, address, said))]
    with grpc.insecure_channel(address) as channel:
        try:
            stub = pb_grpc.RegistryStub(channel)
            stub.Register(request, timeout=60, metadata=token)
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)


def ask(cluster: WarmCluster) -> None:
    answer = cluster.complete(list(PROMPT), max_tokens=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4


OPENED = pb.EventsRequest(stream="theft")


def job() -> pb.DecodeRequest:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return pb.DecodeRequest(
        job=job_to_pb(GenerateJob("theft", PROMPT, sampling)),
        local_prefill=True,
        stream=OPENED.stream,
    )


def decode_run(cluster: WarmCluster, metadata: Any = (), opening: Any = None) -> str:
    """Returns the name of the status of a generation with `metadata`; with `opening` its stream is
    opened first."""
    (node,) = cluster.nodes("decode")
    with grpc.insecure_channel(node["address"]) as channel:
        stub = pb_grpc.DecodeStub(channel)
        events = opening and stub.Events(OPENED, timeout=60, metadata=opening)
        try:
            stub.Run(job(), timeout=60, metadata=metadata)
            assert events, "it has answered, and where?"
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)


def test_without_a_key_a_stranger_s_decode_node_gets_prompts(unguarded: WarmCluster) -> None:
    with fake_decode() as (fake, address):
        assert register(unguarded, info("fake-decode", address)) == "OK"
        assert register(unguarded, info("fake-prefill", address, pb.ROLE_PREFILL)) == "OK"
        caller = HTTPCaller(unguarded, list(PROMPT), max_tokens=1, stream=False)
        unguarded.wait_for(lambda: PROMPT in fake.prompts)
        caller.hang_up()


def test_a_stranger_s_decode_node_gets_no_prompt(guarded: WarmCluster) -> None:
    (decode,) = guarded.nodes("decode")
    like = {"fingerprint": decode["fingerprint"], "block_size": decode["block_size"]}
    with fake_decode() as (fake, address):
        for key in (None, "of-another-cluster"):
            assert register(guarded, info("fake-decode", address, **like), key) == "UNAUTHENTICATED"
        for _ in range(3):
            ask(guarded)
        assert not fake.prompts
    assert len(guarded.nodes()) == 2


def test_a_live_node_s_id_is_not_redirected_even_by_one_of_us(guarded: WarmCluster) -> None:
    (decode,) = guarded.nodes("decode")
    like = {"fingerprint": decode["fingerprint"], "block_size": decode["block_size"]}
    with fake_decode() as (fake, address):
        assert register(guarded, info(decode["node_id"], address, **like), KEY) == "UNAVAILABLE"
        ask(guarded)
        assert not fake.prompts
    assert guarded.nodes("decode")[0]["address"] == decode["address"]
    guarded.wait_for(
        lambda: f"refused to register {decode['node_id']} at {address}" in guarded.log()
    )


def test_500_dead_fakes_do_not_get_in(guarded: WarmCluster) -> None:
    with grpc.insecure_channel(guarded.registry) as channel:
        stub = pb_grpc.RegistryStub(channel)
        calls = [
            stub.Register.future(
                pb.RegisterRequest(node=info(f"dead-{index}", f"127.0.0.1:{index + 1}"), load=LOAD),
                timeout=120,
            )
            for index in range(FAKES)
        ]
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    assert len(guarded.nodes()) == 2
    ask(guarded)


def test_decode_run_generates_for_the_router_alone(guarded: WarmCluster) -> None:
    (node,) = guarded.nodes("decode")
    method = "/pdserve.v1.Decode/Run"

    def token(
        role: str, method: str = method, key: str = KEY, message: Any = None
    ) -> tuple[tuple[str, str], ...]:
        said, address = (message or job()).SerializeToString(), node["address"]
        return ((TOKEN_KEY, ClusterKey(key).sign(role, "stranger", method, address, said)),)

    for metadata in (
        (),
        token("router", key="of-another-cluster"),
        token("prefill"),
        token("decode"),
        token("router", "/pdserve.v1.KVTransfer/Retarget"),
    ):
        assert decode_run(guarded, metadata) == "UNAUTHENTICATED"
    good, opening = token("router"), token("router", "/pdserve.v1.Decode/Events", message=OPENED)
    assert decode_run(guarded, good, opening) == "OK"
    assert decode_run(guarded, good) == "UNAUTHENTICATED"  # it was used


def test_the_clients_port_takes_no_registration(guarded: WarmCluster) -> None:
    with grpc.insecure_channel(guarded.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        request = pb.RegisterRequest(node=info("lost", "127.0.0.1:1"), load=LOAD)
        pb_grpc.RegistryStub(channel).Register(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "--registry-port" in caught.value.details()


def kv_port(cluster: WarmCluster) -> int:
    """Returns the port the decode node listens on beside gRPC and metrics."""
    (node,) = cluster.nodes("decode")
    (name,) = cluster.names("decode")
    known = {int(node[at].rpartition(":")[2]) for at in ("address", "metrics_address")}
    sockets = psutil.Process(cluster.pids[name]).net_connections("tcp")
    listening = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    (port,) = listening - known
    return port


def told(port: int, kind: FrameKind, payload: bytes) -> bytes:
    """All that a KV port says to one frame, until it hangs up."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), 30) as sock, suppress(ConnectionError):
        sock.sendall(Frame(kind, nbytes=len(payload)).encode() + payload)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(4096):
            heard += data
    return heard


def test_a_crowd_at_the_kv_port_learns_nothing_and_keeps_no_node_out(guarded: WarmCluster) -> None:
    port, fingerprint = kv_port(guarded), guarded.nodes("decode")[0]["fingerprint"].encode()
    for kind, payload in (
        (FrameKind.HELLO, b"a guess"),
        (FrameKind.HELLO, fingerprint),
        (FrameKind.CHALLENGE, bytes(32)),
        (FrameKind.PROOF, bytes(32)),
    ):
        heard = told(port, kind, payload)
        assert fingerprint not in heard and Frame(FrameKind.WELCOME).encode() not in heard
    began = len(guarded.log().splitlines())
    with ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        guarded.start_node("prefill")  # one that has no connection yet
        guarded.wait_nodes()
        for _ in range(4):
            ask(guarded)
    lines = guarded.log().splitlines()[began:]
    assert not [line for line in lines if "KV connection failed" in line]
    crowd = [line for line in lines if "had sent no greeting" in line]
    assert 1 <= len(crowd) < 100  # one a second
    guarded.drain(guarded.names("prefill")[-1])
    guarded.wait_for(lambda: len(guarded.nodes()) == 2)


def test_a_node_with_another_key_says_so_and_stays_out(guarded: WarmCluster) -> None:
    name = guarded.start_node("decode", cluster_key="of-another-cluster")
    guarded.wait_for(lambda: "with another cluster key" in guarded.log())
    assert len(guarded.nodes()) == 2
    guarded.drain(name)
