"""Processes inherit no secrets; and how modules are loaded."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import psutil
import pytest

from pdserve.common.core import native_library
from pdserve.common.core.host import helper_environment, loading, role_environment
from pdserve.common.distributed.launch import spawn
from pdserve.kv_transfer.conformance.remote import Process

VALUE = "s3cret-of-16-chars"
SECRETS = {
    "PDSERVE_API_KEY": VALUE, "PDSERVE_CLUSTER_KEY": VALUE, "HF_TOKEN": VALUE,
    "HUGGING_FACE_HUB_TOKEN": VALUE, "OPENAI_API_KEY": VALUE, "OTEL_EXPORTER_OTLP_HEADERS": VALUE,
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": VALUE, "AWS_SECRET_ACCESS_KEY": VALUE,
    "AWS_SESSION_TOKEN": VALUE, "GOOGLE_APPLICATION_CREDENTIALS": VALUE, "DB_PASSWORD": VALUE,
    "https_proxy": f"http://me:{VALUE}@proxy:3128",
}  # fmt: skip
NEEDED = {
    "PDSERVE_CACHE": "/cache",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "http_proxy": "http://proxy:3128",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **NEEDED}.items():
        monkeypatch.setenv(name, value)


def check(environment: str) -> None:
    """Checks the environment of a process that runs, as its kernel shows it."""
    assert VALUE not in environment
    assert not [name for name in SECRETS if f"{name}=" in environment]
    assert "NCCL_SOCKET_IFNAME=eth0" in environment


def shown(pid: int) -> str:
    deadline = time.monotonic() + 60
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):  # it is being executed
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return environment.decode()


def test_helpers_get_what_they_need_and_no_secrets() -> None:
    got = helper_environment({"PYTHONPATH": "/here"})
    assert not SECRETS.keys() & got.keys()
    assert got.items() >= {**NEEDED, "PYTHONPATH": "/here", "PATH": os.environ["PATH"]}.items()


def test_roles_get_options_by_flags_and_what_their_libraries_need() -> None:
    got = role_environment({"PDSERVE_CLUSTER_KEY": "its own"})
    assert got["PDSERVE_CLUSTER_KEY"] == "its own" and "PDSERVE_API_KEY" not in got
    assert got.items() >= {**NEEDED, "HF_TOKEN": VALUE}.items(), "a role may download"


async def test_processes_that_work_for_another_inherit_no_secrets(tmp_path: Path) -> None:
    """Ranks, peers of the conformance kit, and compilers."""
    before = set(psutil.Process().children())
    rank, peer = await spawn(tmp_path, 0), Process()
    try:
        children = set(psutil.Process().children()) - before
        assert len(children) >= 2
        for child in children:
            check(shown(child.pid))
    finally:
        rank.kill()
        peer.kill()
        await rank.wait()
    found = tmp_path / "environment"
    native_library._run(["sh", "-c", f"env > {found}"], None, str(tmp_path))
    check(found.read_text())


def test_loaded_modules_are_not_searched() -> None:
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and len(kept) == 1000
    assert gc.get_freeze_count() >= before + 1000


def test_the_collector_is_back_when_loading_fails() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("no such module")
    assert gc.isenabled()
