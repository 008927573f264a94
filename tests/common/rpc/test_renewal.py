"""Certificates that are renewed while they are in use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.certs import renew, write
from pdserve.cli.main import main
from pdserve.common.rpc import renewal
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.rpc.tls import TLS


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TLS:
    monkeypatch.setattr(renewal, "PERIOD", 0.0)
    write(tmp_path, ["127.0.0.1"], keep_ca=True)
    return TLS(*(tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")))


async def answers(channels: Channels, address: str) -> bool:
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    return bool(answer.status)


async def test_both_ends_of_a_connection_follow_the_files(files: TLS, tmp_path: Path) -> None:
    """Also to another CA, which refuses all that the one before has signed."""
    server, channels, late = GrpcServer(), Channels(files), Channels(files)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, files)}"
    await server.start()
    try:
        before = channels.get(address)
        assert await answers(channels, address)
        write(tmp_path / "other", ["127.0.0.1"])
        for name in ("ca", "key", "cert"):
            shutil.copy(tmp_path / "other" / f"{name}.pem", tmp_path)
        assert await answers(channels, address) and channels.get(address) is not before
        assert await answers(late, address)
    finally:
        await channels.close()
        await late.close()
        await server.stop(0)


def test_files_that_cannot_be_used_are_not(
    files: TLS, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = files.renewals()
    assert not found.renewed()
    renew(tmp_path, ["127.0.0.1"])
    assert found.renewed() and not found.renewed()
    write(tmp_path / "other", ["127.0.0.1"], client=True)
    other = tmp_path / "other"
    for cert, key in (("client-cert", "client-key"), ("cert", "cert"), ("cert", "key")):
        shutil.copy(other / f"{cert}.pem", files.cert)
        shutil.copy(other / f"{key}.pem", files.key)
        assert not found.renewed() and not found.renewed()
    assert len(caplog.messages) == 3, "each is told once"
    files.key.unlink()
    assert not found.renewed()
    renew(tmp_path, ["127.0.0.1"])
    assert found.renewed()


def test_a_certificate_that_names_fewer_roles_is_not_used(files: TLS, tmp_path: Path) -> None:
    found = files.renewals()
    other = tmp_path / "other"
    write(other, ["127.0.0.1"], client=True)
    shutil.copy(other / "ca.pem", files.ca)
    shutil.copy(other / "client-key.pem", files.key)
    shutil.copy(other / "client-cert.pem", files.cert)
    assert not found.renewed()


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--renew"], "--keep-ca writes them"), (["--renew", "--client"], "excludes --client")],
)
def test_certs_renews_what_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    assert main(["certs", str(tmp_path), *argv]) == 2
    assert says in capsys.readouterr().err
