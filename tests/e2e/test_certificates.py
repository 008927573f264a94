"""Every role has a certificate of its own, and none is good for another role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference
from callers import fresh_prompt
from pdserve.cli import certs
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from warm import WarmCluster, run_roles

MODEL = "llama-gqa"
ROLES = ("prefill", "decode")
pytestmark = pytest.mark.slow  # its fast twin, in one process: tests/common/rpc/test_cluster_key.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("by-role") / "certs"
    certs.write(made, certs.HOSTS, by_role=True)
    return made


def pair(folder: Path, role: str) -> dict[str, Any]:
    files = {"tls_cert": f"{role}-cert.pem", "tls_key": f"{role}-key.pem", "tls_ca": "ca.pem"}
    return {option: folder / name for option, name in files.items()}


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[WarmCluster]:
    router = pair(folder, "router")
    options = {"dtype": "float32", "kv_connector": "tcp"}
    with WarmCluster(MODEL, prefill=0, decode=0, router=router, **options) as made:
        for role in ROLES:
            made.start_node(role, **pair(folder, role))
        made.wait_nodes()
        yield made


def test_roles_serve_with_a_certificate_each(cluster: WarmCluster) -> None:
    prompt = fresh_prompt(40)
    body = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    answer = cluster.complete(prompt, **body)
    tokens = tuple(answer["choices"][0]["token_ids"])
    assert tokens == reference.greedy(cluster.model, tuple(prompt), 8)
    cluster.wait_idle()


def test_another_role_s_certificate_is_told_at_start(
    cluster: WarmCluster, folder: Path, tmp_path: Path
) -> None:
    files = [f"--{name.replace('_', '-')}={path}" for name, path in pair(folder, "prefill").items()]
    common = [f"--model={cluster.model}", f"--router={cluster.registry}", *files]
    keyed = [*common, f"--cluster-key={'k' * 32}"]
    for code, said in run_roles(tmp_path, [["decode_node", *common], ["decode_node", *keyed]]):
        assert code and "does not name the role decode" in said


def test_a_node_s_certificate_is_no_router_s_and_no_other_node_s(
    cluster: WarmCluster, folder: Path
) -> None:
    decode = cluster.nodes("decode")[0]
    key, cert = ((folder / f"prefill-{name}.pem").read_bytes() for name in ("key", "cert"))
    ca = (folder / "ca.pem").read_bytes()
    shown = grpc.ssl_channel_credentials(ca, key, cert)
    with grpc.secure_channel(decode["address"], shown) as channel:
        with pytest.raises(grpc.RpcError, match="prefill may not call") as refused:
            pb_grpc.DecodeStub(channel).FinishChoice(pb.FinishChoiceRequest(), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    name, role = "decode-ffffff", pb.ROLE_DECODE
    node = pb.NodeInfo(node_id=name, role=role, address="127.0.0.1:1", model=cluster.model.name)
    with grpc.secure_channel(cluster.registry, shown) as channel:
        with pytest.raises(grpc.RpcError, match="the caller is not the decode node") as refused:
            pb_grpc.RegistryStub(channel).Register(pb.RegisterRequest(node=node), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
