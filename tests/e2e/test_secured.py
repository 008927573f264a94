"""A cluster with everything that protects it switched on, and who is refused by it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import grpc
import psutil
import pytest
import requests
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

import reference
from cluster import Cluster
from pdserve.cli.main import main
from pdserve.common.config.shared import TLSConfig
from pdserve.common.rpc.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.tls import TLS
from pdserve.kv_transfer.frame import Frame, FrameKind
from warm import WarmCluster

KEY, ADMIN_KEY = "correct-horse", "battery-staple"
CHAT = [{"role": "user", "content": "Tell me about a girl named Zoë, a mill and a naïve fox."}]
TOKENS = 20


def make_certs(folder: Path) -> Path:
    assert main(["certs", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certs(tmp_path_factory.mktemp("certs") / "ours")


@pytest.fixture(scope="module")
def cluster(certs: Path) -> Iterator[WarmCluster]:
    files = {f"tls_{name}": certs / f"{name}.pem" for name in ("cert", "key", "ca")}
    router = {**files, "no_ui": "", "api_key": KEY, "admin_api_key": ADMIN_KEY}
    router["prefill_policy"] = "cost"  # asks what nodes have cached
    kv = {"kv_connector": "tcp", "kv_connector_config": '{"tls": true}'}
    with WarmCluster("qwen2", router=router, **files, **kv) as cluster:
        cluster.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        yield cluster
        cluster.wait_idle()
        assert KEY not in cluster.log() and ADMIN_KEY not in cluster.log()


def credentials(folder: Path | None, ca: Path) -> grpc.ChannelCredentials:
    """Returns the credentials of a client that trusts `ca` and shows the certificate of `folder`,
    if any."""
    pair = [(folder / name).read_bytes() for name in ("key.pem", "cert.pem")] if folder else []
    return grpc.ssl_channel_credentials((ca / "ca.pem").read_bytes(), *pair)


def chat(cluster: WarmCluster) -> requests.Response:
    body = {"messages": CHAT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return cluster.post("/v1/chat/completions", **body)


def expected(cluster: WarmCluster) -> str:
    _, tokenizer = reference.load(cluster.model)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    ids = tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    return reference.decode(cluster.model, reference.greedy(cluster.model, ids, TOKENS))


def test_the_router_hears_what_nodes_have_cached(cluster: WarmCluster) -> None:
    def known() -> float:
        lines = cluster.get("/metrics").text.splitlines()
        blocks = (line for line in lines if line.startswith("pdserve_prefix_index_blocks{"))
        return sum(float(line.rpartition(" ")[2]) for line in blocks)

    assert chat(cluster).status_code == 200
    cluster.wait_for(known)


def test_a_chat_gives_the_reference(cluster: WarmCluster, certs: Path) -> None:
    response = chat(cluster)
    assert response.status_code == 200, f"{response.text}\n{cluster.log()[-3000:]}"
    assert response.json()["choices"][0]["message"]["content"] == expected(cluster)
    with grpc.secure_channel(cluster.grpc, credentials(certs, certs)) as channel:
        request = inference_pb2.GenerateRequest(
            text="Once upon a time", sampling=inference_pb2.SamplingParams(temperature=0.0)
        )
        key = (("authorization", f"Bearer {KEY}"),)
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(request, timeout=120, metadata=key))


def test_without_the_key_there_is_no_answer(cluster: WarmCluster, certs: Path) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/models", "/v1/cluster"):
            answer = requests.get(cluster.url + path, headers=headers, timeout=60)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/metrics"):
        assert requests.get(cluster.url + path, timeout=60).status_code == 200
    assert requests.get(f"{cluster.url}/ui", timeout=60).status_code == 404  # --no-ui
    with grpc.secure_channel(cluster.grpc, credentials(certs, certs)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            stub = inference_pb2_grpc.InferenceStub(channel)
            stub.GetModel(inference_pb2.GetModelRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_clients_key_is_no_operators(cluster: WarmCluster) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "clients"}
    body = {"prompt": "a", "max_tokens": 2}
    url = f"{cluster.url}/v1/completions"
    assert requests.post(url, json=body, headers=headers, timeout=60).status_code == 200
    for path in ("/v1/cluster", "/v1/cluster/history", "/v1/cluster/targets"):
        assert requests.get(cluster.url + path, headers=headers, timeout=60).status_code == 403
    reset = f"{cluster.url}/reset_prefix_cache"
    assert requests.post(reset, headers=headers, timeout=60).status_code == 403
    assert cluster.get("/v1/timelines/clients").json()["data"][0]["completion_tokens"] == 2


def test_the_cluster_s_state_shows_no_keys(cluster: WarmCluster) -> None:
    assert not [key for key in (KEY, ADMIN_KEY) if key in cluster.get("/v1/cluster").text]


def test_without_our_certificate_no_role_answers(
    cluster: WarmCluster, certs: Path, tmp_path: Path
) -> None:
    theirs = make_certs(tmp_path / "theirs")
    addresses = [cluster.grpc, cluster.registry, *(node["address"] for node in cluster.nodes())]
    refused = [
        credentials(None, certs),  # it shows none
        credentials(theirs, certs),  # another CA's
        credentials(theirs, theirs),
        None,  # plain text
    ]
    for address in addresses:
        for shown in refused:
            open_ = grpc.secure_channel(address, shown) if shown else grpc.insecure_channel(address)
            with open_ as channel, pytest.raises(grpc.RpcError) as caught:
                check = health_pb2.HealthCheckRequest()
                health_pb2_grpc.HealthStub(channel).Check(check, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with grpc.secure_channel(address, credentials(certs, certs)) as channel:
            check = partial(health_pb2_grpc.HealthStub(channel).Check, timeout=60)
            cluster.wait_for(partial(serving, check))  # a router looks every second


def serving(check: Callable[..., health_pb2.HealthCheckResponse]) -> bool:
    answer = check(health_pb2.HealthCheckRequest())
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_stranger_cannot_register_a_node(cluster: WarmCluster) -> None:
    before = len(cluster.nodes())
    node = cluster_pb2.NodeInfo(
        node_id="evil", role=cluster_pb2.ROLE_DECODE, address="127.0.0.1:1", model="qwen2"
    )
    with grpc.insecure_channel(cluster.registry) as channel, pytest.raises(grpc.RpcError):
        registry = cluster_pb2_grpc.RegistryStub(channel)
        registry.Register(cluster_pb2.RegisterRequest(node=node), timeout=60)
    assert len(cluster.nodes()) == before


def kv_ports(cluster: WarmCluster) -> list[int]:
    """Returns the ports the decode node listens on beside gRPC and metrics."""
    (node,) = cluster.nodes("decode")
    process = psutil.Process(cluster.pids[cluster.names("decode")[0]])
    known = {int(node[name].rpartition(":")[2]) for name in ("address", "metrics_address")}
    listening = [
        each.laddr.port
        for one in (process, *process.children(recursive=True))
        for each in one.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    return sorted(set(listening) - known)


def test_a_stranger_at_the_kv_port_gets_nothing(
    cluster: WarmCluster, certs: Path, tmp_path: Path
) -> None:
    chat(cluster)  # so that a connection of the prefill rank is there
    theirs = make_certs(tmp_path / "theirs")
    stranger = TLS.load(
        TLSConfig(**{f"tls_{name}": str(theirs / f"{name}.pem") for name in ("cert", "key", "ca")})
    )
    assert stranger is not None
    ours = ssl.create_default_context(cafile=certs / "ca.pem")  # the right CA, no certificate
    other = stranger.client_context()
    other.load_verify_locations(certs / "ca.pem")
    (port,) = kv_ports(cluster)
    fingerprint = cluster.nodes("decode")[0]["fingerprint"].encode()
    hello = Frame(FrameKind.HELLO, nbytes=len(fingerprint)).encode() + fingerprint
    for context in (None, ours, other):
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            assert b"pdKV" not in overheard(sock, context, hello)
    assert chat(cluster).json()["choices"][0]["message"]["content"] == expected(cluster)


def overheard(sock: socket.socket, context: ssl.SSLContext | None, hello: bytes) -> bytes:
    """All that the other side says after a HELLO, until it hangs up."""
    heard = b""
    try:
        peer = context.wrap_socket(sock, server_hostname="127.0.0.1") if context else sock
        peer.sendall(hello)
        while data := peer.recv(4096):
            heard += data
    except (ssl.SSLError, ConnectionError):
        pass
    return heard


# ---- certificates that are renewed while the cluster serves ----


def serial(port: int, certs: Path) -> str:
    """Returns the serial number of the certificate that a server shows, to a client that has one
    itself."""
    context = TLS(certs / "cert.pem", certs / "key.pem", certs / "ca.pem").client_context()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
    ):
        shown = wrapped.getpeercert()
    assert shown
    return str(shown["serialNumber"])


def written(certs: Path) -> str:
    """The serial number of the certificate in the file."""
    cert = x509.load_pem_x509_certificate((certs / "cert.pem").read_bytes())
    return f"{cert.serial_number:X}"


def all_show(ports: list[int], certs: Path, number: str) -> bool:
    return {int(serial(port, certs), 16) for port in ports} == {int(number, 16)}


def more_than(codes: list[int], count: int) -> bool:
    return len(codes) > count


class HTTPSCluster(Cluster):
    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")


def run_certs(*args: str | Path) -> None:
    assert main(["certs", *map(str, args)]) == 0


@pytest.mark.slow  # two renewals under load: seconds of CPU
def test_renewed_certificates_are_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    run_certs(certs, "--keep-ca")
    files = {name: certs / f"{name}.pem" for name in ("cert", "key", "ca")}
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files["ca"]))
    with HTTPSCluster(
        "qwen2",
        **{f"tls_{name}": path for name, path in files.items()},
        kv_connector="tcp",
        ssl_certfile=files["cert"],
        ssl_keyfile=files["key"],
    ) as cluster:
        ports = [cluster.ports[name] for name in ("http", "grpc")]
        ports += [int(str(node["address"]).rpartition(":")[2]) for node in cluster.nodes()]
        assert all_show(ports, certs, written(certs))
        codes: list[int] = []
        stop = Event()

        def load() -> None:
            while not stop.is_set():
                codes.append(chat(cluster).status_code)

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(load) for _ in range(4)]
            try:
                for _ in range(2):
                    run_certs(certs, "--renew")
                    new = written(certs)
                    cluster.wait_for(partial(all_show, ports, certs, new))
                    before = len(codes)
                    cluster.wait_for(partial(more_than, codes, before + 8))
                files["cert"].write_text("not a certificate")
                cluster.wait_for(lambda: "a renewed certificate is not used" in cluster.log())
            finally:
                stop.set()
            for each in done:
                each.result()
        assert set(codes) == {200}
        assert not [
            line for line in cluster.log().splitlines() if "migrates to other nodes" in line
        ]
