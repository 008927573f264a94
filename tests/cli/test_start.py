"""A process that cannot start says why and what to do, in one sentence, and exits with 2."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
import torch

from benchmarks.warm_start import alive
from paths import MODELS
from pdserve.cli.main import main
from pdserve.common.config.node import NodeConfig
from pdserve.common.core import host
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import host_errors_as_config_errors, raise_open_file_limit
from pdserve.common.distributed import environment
from pdserve.common.distributed.environment import DistributedEnvironment
from pdserve.common.model import device
from pdserve.common.model.attention import AttentionShape
from pdserve.common.node import registration
from pdserve.common.node.server import NodeServer
from pdserve.common.obs.process import read_ports
from pdserve.common.rpc.channels import Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.demo_model import embedded
from waiting import wait_until
from warm import run_roles, shared

MODEL = str(MODELS / "llama-gqa")
MODULES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}


def arguments(role: str, *flags: str) -> list[str]:
    ports = ["--grpc-port=0", *(["--port=0", "--registry-port=0"] if role == "router" else [])]
    return [f"--model={MODEL}", *ports, *flags]


def last_line(code: int, output: str) -> str:
    assert code == 2, output
    assert "Traceback" not in output
    *_, last = output.splitlines()
    assert "blame=" not in last or "blame=operator" in last
    return last


def test_every_role_says_which_option_it_refuses(tmp_path: Path) -> None:
    """Each in a process of its own, all at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ("prefill", f"--metrics-port={port}", f"{port} for metrics: .*another"),
            ("decode", f"--metrics-port={port}", f"{port} for metrics: .*another"),
            ("decode", f"--grpc-port={port}", f"{port} for gRPC: .*use: choose another --grpc-p"),
            ("decode", "--kv-connector=shared", "shared was removed: use shm, or .* --both"),
            ("router", f"--port={port}", f"cannot listen on 127.0.0.1:{port}: .*in use"),
            ("router", f"--grpc-port={port}", f"{port} for gRPC: .*use: choose another --grpc-p"),
            ("router", '--hf-overrides={"rope_scaling": null}', "default.*, not by null"),
            ("decode", '--rope-scaling={"type": "su"}', "rope type 'su' is not supported; .*yarn"),
            ("router", "--ports-file=/no/such/p", "/no/such/p.*: No such .*: create it first"),
        ]
        commands = [[MODULES[role], *arguments(role, flag)] for role, flag, _ in cases]
        found = [last_line(*ended) for ended in run_roles(tmp_path, commands)]
    for output, (_, _, expected) in zip(found, cases, strict=True):
        assert re.search(expected, output), (output, expected)


def test_every_role_says_that_it_may_open_too_few_files() -> None:
    """Real commands, with nothing imported before."""
    shell = 'ulimit -n 64; exec "$@"'
    started = {
        role: subprocess.Popen(
            ["sh", "-c", shell, "-", sys.executable, "-m", f"pdserve.{module}", *arguments(role)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, module in MODULES.items()
    }
    found = {}
    for role, process in started.items():
        _, output = process.communicate(timeout=250)
        found[role] = last_line(process.returncode, output)
    router = found.pop("router")
    assert re.search(r"may open 64 files .*ulimit -n .*--max-concurrent-req", router)
    for output in found.values():
        assert re.search("may open 64 files and needs up to 512: .*ulimit -n", output)


def test_a_shell_s_usual_limit_of_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_file_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, host.AMPLE_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "a volume or a tmpfs"),
        (errno.EACCES, f"give user {os.getuid()}, which this process runs as, access"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EAGAIN, "pids limit"),
    ],
)
def test_a_refusal_of_the_host_says_the_fix(number: int, fix: str) -> None:
    with pytest.raises(ConfigError) as raised, host_errors_as_config_errors():
        raise OSError(number, os.strerror(number), "/models/x/config.json")
    assert raised.value.message.startswith("/models/x/config.json: ")
    assert fix in raised.value.message


def test_a_log_on_a_full_disk_stops_no_role(tmp_path: Path) -> None:
    """/dev/full is one."""
    ports = tmp_path / "ports.json"
    flags = arguments("router", f"--ports-file={ports}")
    router = shared().start("router", flags, Path("/dev/full"))
    try:
        while (found := read_ports(ports)) is None:
            assert alive(router)
            time.sleep(0.02)
        url = f"http://127.0.0.1:{found['http']}"
        assert requests.post(f"{url}/v1/completions", data=b"{", timeout=30).status_code == 400
        assert requests.get(f"{url}/health", timeout=30).status_code == 200
    finally:
        os.kill(router, signal.SIGTERM)
        wait_until(lambda: shared().exit_code(router) is not None)
    assert shared().exit_code(router) == 0


# ---- full disks ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB large, and full."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with (tmp_path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_under_the_ports_file(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = ["router", *arguments("router", f"--ports-file={small_disk}/ports.json")]
    (ended,) = run_roles(tmp_path_factory.mktemp("log"), [command])
    output = last_line(*ended)
    assert f"{small_disk}/ports.json: No space left on device: free some space" in output


def test_no_room_for_the_embedded_model(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_gguf", lambda: Path("/unused"))
    with pytest.raises(ConfigError, match=r"264 MiB.*PDSERVE_CACHE"):
        embedded.ensure_embedded_model(small_disk)


# ---- models ----------------------------------------------------------------------------------


def test_a_folder_that_is_no_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(path: Path) -> str:
        assert main(["model", str(path)]) == 2
        return capsys.readouterr().err

    folder, text = tmp_path / "tiny", tmp_path / "notes.txt"
    text.touch()
    folder.mkdir()
    (folder / "tiny-Q4.gguf").touch()
    assert f"{folder} has GGUF files and no config.json: name one of the files" in says(folder)
    assert f"{text} is a file, not a checkpoint folder" in says(text)


def test_a_path_that_is_not_there_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(path: Path | str) -> str:
        assert main(["model", str(path)]) == 2
        return capsys.readouterr().err.partition("error: ")[2].strip()

    for name in ("models/Qwen3-8B", "models/SmolLM2", "models/logs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "SmolLM2" / "config.json").touch()
    models = tmp_path / "models"
    missing = f"the folder {models}"
    assert (
        says(models / "qwen3-8b")
        == f"{missing}/qwen3-8b does not exist; did you mean {models}/Qwen3-8B?"
    )
    assert says(models / "other") == f"{missing}/other does not exist; there is {models}/SmolLM2"
    wrong = tmp_path / "modles" / "Qwen3-8B"
    near = f"there is no {tmp_path}/modles; did you mean {models}?"
    assert says(wrong) == f"the folder {wrong} does not exist: {near}"
    assert says("/nowhere/at/all") == (
        "the folder /nowhere/at/all does not exist: there is no /nowhere"
    )


def test_the_log_of_a_start_has_sentences_and_json_has_codes() -> None:
    pdserve = Path(sys.executable).with_name("pdserve")
    flags = ["--model", "/nowhere/at/all", "--log-format"]
    started = [
        subprocess.Popen([str(pdserve), role, *flags, form], stderr=subprocess.PIPE, text=True)
        for role, form in (("router", "text"), ("router", "json"), ("both", "json"))
    ]
    text, *lines = (each.communicate(timeout=120)[1] for each in started)
    sentence = "the folder /nowhere/at/all does not exist: there is no /nowhere"
    assert text.splitlines()[-1].endswith(f" ERROR   router - {sentence}")
    assert "BAD_CONFIG" not in text and "blame" not in text
    for role, line in zip(("router", "both"), lines, strict=True):
        event = json.loads(line.splitlines()[-1])
        wanted = {"message": sentence, "code": "BAD_CONFIG", "blame": "operator", "role": role}
        assert event.items() >= wanted.items()


def test_a_model_that_this_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To root all files are readable."""
    (tmp_path / "config.json").write_text("{}")
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path / "config.json" and allowed(path, mode)
    )
    assert main(["model", str(tmp_path)]) == 2
    assert f"this process (user {os.getuid()}) may not read" in capsys.readouterr().err


# ---- addresses -------------------------------------------------------------------------------


async def test_a_node_announces_its_host_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "f00dcafe")
    config = NodeConfig(advertise_host="auto")
    server = NodeServer(config, Credentials("decode", "decode-0"))
    assert server.bind().startswith("f00dcafe:")
    await server.stop()


def test_without_a_default_route_the_host_s_name_says_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = DistributedEnvironment(0, 1, torch.device("cpu"), 1.0, "auto")
    monkeypatch.setattr(environment, "address_towards", lambda url: "127.0.0.1")
    monkeypatch.setattr(environment, "address_of_name", lambda: "172.19.0.3")
    assert here.address_for_others == "172.19.0.3"
    monkeypatch.setattr(environment, "address_towards", lambda url: "10.0.0.2")
    assert here.address_for_others == "10.0.0.2"


# ---- GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "installed", "fix"),
    [
        (torch.float32, 64, "0.6.6", "--dtype bfloat16"),
        (torch.bfloat16, 64, "", "pip install 'pdserve.cuda.'"),
        (torch.bfloat16, 32, "0.6.6", "heads of size 32, only 64, 128, 256"),
        (torch.float16, 64, "0.2.1", "FlashInfer 0.2.1 .* 'flashinfer-python>=0.5.3,<0.8'"),
    ],
)
def test_slower_attention_on_a_gpu_is_a_warning(
    dtype: torch.dtype,
    head_dim: int,
    installed: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = device.flashinfer_limits
    monkeypatch.setattr(limits, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(limits, "version", lambda name: installed)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    device.make_backend(shape, torch.device("cpu"), dtype)
    assert not caplog.records
    device.make_backend(shape, torch.device("cuda", 0), dtype)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(fix, record.getMessage())


# ---- stopping --------------------------------------------------------------------------------


class AwayRouter:
    """Answers `beats` calls, then is gone."""

    def __init__(self, beats: int) -> None:
        self._beats = beats
        self.away = asyncio.Event()

    async def Register(self, *_: object, **__: object) -> pb.RegisterResponse:
        self._beats -= 1
        if self._beats < 0:
            if self._beats == -3:  # those before have been dealt with
                self.away.set()
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "gone")
        return pb.RegisterResponse(heartbeat_interval_s=0.01)

    def Heartbeats(self) -> AwayRouter:
        return self  # the stream

    async def write(self, _: pb.HeartbeatRequest) -> None:
        await self.Register()

    async def read(self) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse(known=True)

    def cancel(self) -> None: ...


def no_load(router: str) -> pb.NodeLoad:
    return pb.NodeLoad()


@pytest.mark.parametrize(("beats", "warnings"), [(3, 0), (0, 1)])
async def test_a_router_that_stops_before_its_nodes_is_no_warning(
    beats: int,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that was never there is. `up` and `demo` stop the nodes within the patience."""
    monkeypatch.setattr(registration, "_RETRY_DELAY", 0.01)
    server = NodeServer(NodeConfig(), Credentials("decode", "decode-0"))
    here = registration.Registration("127.0.0.1:1", pb.NodeInfo(), no_load, server.channels)
    router: Any = AwayRouter(beats)
    monkeypatch.setattr(here, "_stub", lambda: router)
    task = asyncio.create_task(here.run())
    await asyncio.wait_for(router.away.wait(), 60)
    task.cancel()
    found = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == warnings
    await server.stop()
