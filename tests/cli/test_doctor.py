"""`pdserve doctor` says what is not in order, and what helps."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from paths import MODELS
from pdserve.cli import doctor
from pdserve.cli.doctor import main
from pdserve.client.server import Server


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main([*argv, "--json"])
    return code, {each["subject"]: each for each in json.loads(capsys.readouterr().out)}


def test_a_host_that_serves(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        free = unused.getsockname()[1]
        unused.close()
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        code, seen = run(
            capsys, "--port", str(free), "--peer", address, "--model", str(MODELS / "qwen2")
        )
    assert code == 0
    for subject in ("torch", "aiohttp", "model", f"peer {address}", f"port {free}"):
        assert seen[subject]["verdict"] == "ok", seen[subject]
        assert not seen[subject]["fix"]


def test_each_fault_has_its_fix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        peers = ("127.0.0.1:1", "x", "x:99999")
        flags = [word for peer in peers for word in ("--peer", peer)]
        code, seen = run(capsys, "--port", port, *flags, "--model", "/nowhere")
    assert code == 1
    faults = {subject: each for subject, each in seen.items() if each["verdict"] == "failed"}
    assert set(faults) == {*(f"peer {peer}" for peer in peers), "model"}
    assert seen[f"port {port}"]["verdict"] == "warning"
    assert all(
        each["fix"] not in ("", "report this") for each in seen.values() if each["verdict"] != "ok"
    )


def test_a_package_that_lacks_or_is_too_old(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "aiohttp>=99",
        "no-such-package",
        'no-such-torch; extra == "node"',
        'x; extra == "dev"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    code, seen = run(capsys)
    assert code == 1
    assert seen["aiohttp"]["fix"] == "pip install 'aiohttp>=99'"
    assert seen["no-such-package"]["verdict"] == "failed"
    assert seen["no-such-torch"]["verdict"] == "warning"
    assert seen["no-such-torch"]["fix"] == "for nodes: pip install 'pdserve[node]'"
    assert "x" not in seen


def test_a_check_that_breaks_stops_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: str) -> list[str]:
        raise ValueError("odd")

    monkeypatch.setattr(doctor, "requires", breaks)
    code, seen = run(capsys)
    assert code == 1 and seen["packages"]["seen"] == "ValueError: odd"
    assert seen["cores"]["verdict"] == "ok"


def test_gpus_that_are_not_there_are_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a table, its fixes whole, without colours in a pipe."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--gpu"]) == 1
    text = capsys.readouterr().out
    assert "failed   torch for CUDA" in text and "\x1b" not in text


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"nodes": None, "ready": True, "reason": "ok"},
        {"nodes": [{}], "ready": True, "reason": "ok"},
        {"nodes": "no", "ready": False, "reason": "ok"},
        {"nodes": [], "ready": False, "reason": "ok", "refused": [{}]},
    ],
)
def test_a_cluster_that_answers_oddly_is_a_finding(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def get(self: Server, path: str, **_: Any) -> Any:
        return state

    monkeypatch.setattr(Server, "get", get)
    code, seen = run(capsys, "--cluster", "http://127.0.0.1:1")
    assert code == 1 and seen["router"]["verdict"] == "failed" and seen["router"]["fix"]
