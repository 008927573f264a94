"""A cluster for clients from outside, which are in an environment without pdserve: `PDSERVE` is the
program. One file per client; all share the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

MODEL, TOOL_MODEL = "llama-gqa", "tool-caller"
MODELS = Path(__file__).parents[1] / "models"
START_TIMEOUT, STOP_TIMEOUT = 120.0, 30.0  # seconds
FLAGS = "--dtype float32 --num-gpu-blocks-override 192 --cpu-threads 1 --restart no"
TOOL_FLAGS = "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"


@dataclass(frozen=True)
class Server:
    url: str
    model: str = MODEL

    @property
    def base_url(self) -> str:
        """As OpenAI's clients want it."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _serve(tmp_path_factory.mktemp("pdserve"), MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model calls tools: `tests/models/tool_dialogues.py` says which and when."""
    with _serve(tmp_path_factory.mktemp("pdserve"), TOOL_MODEL, TOOL_FLAGS) as server:
        yield server


@contextmanager
def _serve(folder: Path, model: str, flags: str = "") -> Iterator[Server]:
    ports, log = folder / "ports.json", folder / "log"
    command = [os.environ.get("PDSERVE", "pdserve"), "up", "--model", str(MODELS / model)]
    command += ["--port", "0", "--grpc-port", "0", "--ports-file", str(ports)]
    command += [*FLAGS.split(), *flags.split()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, stdin=subprocess.DEVNULL
        )
    try:
        yield Server(_ready(process, ports, log), model)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready(process: subprocess.Popen[bytes], ports: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            url = f"http://127.0.0.1:{json.loads(ports.read_text())['http']}"
            if requests.get(f"{url}/ready", timeout=5).ok:
                return url
        except (OSError, ValueError):  # no file yet, or not all of it; no connection yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start\n{log.read_text(errors='replace')}")
