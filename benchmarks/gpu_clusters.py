"""Runs clusters on one GPU or CPU, and compares the texts that they generate."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from pdserve.common.obs.process import read_ports

ROOT = Path(__file__).parents[1]
READY_SECONDS, STOP_SECONDS = 150.0, 20.0
# Prompts of one block, of several blocks, and of several chunks.
PROMPTS = [
    [5 + 7 * i % 300 for i in range(18)],
    [11 + 13 * i % 400 for i in range(100)],
    [3 + 5 * i % 450 for i in range(300)],
]
NUM_TOKENS = 48
COMMON = {"num_gpu_blocks_override": 1000, "max_num_batched_tokens": 128, "max_num_seqs": 16}


@dataclass(frozen=True, slots=True)
class Cluster:
    """All clusters of a `group` must generate the same text. `flags`: of `pdserve up`."""

    group: str
    flags: dict[str, Any]
    on_cpu: bool = False  # whether it can run on a CPU
    device: str | None = None  # default: the run's


# float32 is exact on any device, with a trained model whose choices are clear. bfloat16 uses
# FlashInfer and graphs; its model, with heads of 128, has random weights.
CLUSTERS = {
    "f32-shm-cpu": Cluster("float32", {"kv_connector": "shm"}, on_cpu=True, device="cpu"),
    "f32-tcp": Cluster("float32", {"kv_connector": "tcp"}, on_cpu=True),
    "f32-ipc": Cluster("float32", {"kv_connector": "cuda_ipc"}),
    "bf16-one-node": Cluster("bfloat16", {"both": 1}),
    "bf16-ipc-graphs": Cluster("bfloat16", {"kv_connector": "cuda_ipc"}),
    "bf16-tcp-graphs": Cluster("bfloat16", {"kv_connector": "tcp"}),
    "bf16-tcp-async": Cluster("bfloat16", {"kv_connector": "tcp", "async_scheduling": True}),
    "bf16-tcp-eager": Cluster("bfloat16", {"kv_connector": "tcp", "enforce_eager": True}),
}


@dataclass(frozen=True, slots=True)
class Served:
    """`digest`: of the text of all answers, in order. `error`: "" if all were answered."""

    digest: str = ""
    ready_seconds: float = 0.0
    answer_seconds: float = 0.0
    error: str = ""


def text_of_cluster(cluster: Cluster, log: Path, device: str, seconds: float) -> Served:
    """Starts the cluster, sends the prompts and stops it, within about `seconds`."""
    model = _model(cluster.group, log.parent)
    flags = {**COMMON, "dtype": cluster.group, "device": cluster.device or device, **cluster.flags}
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder, log.open("wb") as output:
        ports_file, started = Path(folder) / "ports.json", time.monotonic()
        command = [str(Path(sys.executable).with_name("pdserve")), "up", "--model", str(model)]
        command += ["--port", "0", "--grpc-port", "0", "--ports-file", str(ports_file)]
        command += ["--restart", "no", *_words(flags)]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            url = _wait_ready(process, ports_file, min(READY_SECONDS, seconds))
            ready = time.monotonic()
            digest = _ask(url)
            return Served(digest, ready - started, time.monotonic() - ready)
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            return Served(error=f"{type(error).__name__}: {error} (see {log.name})")
        finally:
            _stop(process)


def _model(group: str, folder: Path) -> Path:
    if group == "float32":
        return ROOT / "tests" / "models" / "qwen3"
    wide = folder / "wide-model"
    if not (wide / "config.json").exists():
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        from wide_model import make_wide_model

        make_wide_model(wide)
    return wide


def _words(flags: dict[str, Any]) -> Sequence[str]:
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in flags.items()
    ]


def _wait_ready(process: subprocess.Popen[bytes], ports_file: Path, seconds: float) -> str:
    """Returns the URL of the router once it answers /ready."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise OSError(f"it ended with exit code {process.returncode}")
        time.sleep(0.2)
        if (ports := read_ports(ports_file)) is None:
            continue
        url = f"http://127.0.0.1:{ports['http']}"
        try:
            with urlopen(f"{url}/ready", timeout=5):
                return url
        except OSError:  # not yet: HTTPError is one
            continue
    raise TimeoutError(f"not ready in {seconds:.0f} s")


def _ask(url: str) -> str:
    """Returns a digest of the texts only, since ids and times differ between runs."""
    digest = hashlib.sha256()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        request = Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            digest.update(json.load(answer)["choices"][0]["text"].encode())
    return digest.hexdigest()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
