"""Starts, queries and stops servers of the same model on the same cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from benchmarks.fleet import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 300.0  # seconds: some compile first
STOP_TIMEOUT = 20.0
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 32
# `python -c` puts the current folder first on the import path, here the checkout.
PDSERVE = "import sys; from pdserve.cli.main import main; sys.exit(main())"


class Absent(Exception):
    """A peer that is not installed here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that every server gets."""

    model: Path
    dtype: str
    cores: Sequence[int]
    start_timeout: float = START_TIMEOUT

    @property
    def threads(self) -> int:
        return len(self.cores)

    @property
    def max_model_len(self) -> int:
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return min(MAX_MODEL_LEN, int(config["max_position_embeddings"]))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that may be started. `command` takes a port."""

    name: str
    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)  # additional fields of each request
    model: str = "model"  # the name it answers to
    says_done: bool = True  # its streams end with [DONE]


@dataclass(frozen=True, slots=True)
class Running:
    server: Server
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self) -> None:
        """Generates one token. Raises OSError."""
        body = {"model": self.server.model, "prompt": "Once", "max_tokens": 1, "temperature": 0}
        head = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/v1/completions", json.dumps(body).encode(), head)
        with urlopen(request, timeout=60) as answer:
            answer.read()

    def wait_ready(self, seconds: float) -> None:
        """Waits until it answers; raises Absent if it ends or does not answer in time."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                return self.ask()
            time.sleep(0.5)
        how = f"ended with {self.process.poll()}" if self.process.poll() is not None else "is late"
        raise Absent(f"does not start: {how}, see {self.log}")

    def idle_cpu(self, seconds: float = 1.0) -> float:
        """Returns the cores that the idle server uses, and so takes from the measured one."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - before) / seconds

    def _cpu_seconds(self) -> float:
        own = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@contextmanager
def running(server: Server, machine: Machine, logs: Path) -> Iterator[Running]:
    """Runs the server; yields it once it answers.

    Raises:
        Absent: it does not start.
    """
    port, log = free_port(), logs / f"{server.name.replace(' ', '-').replace('/', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command(port),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **server.environment},
            preexec_fn=lambda: os.sched_setaffinity(0, machine.cores),
        )
    try:
        found = Running(server, f"http://127.0.0.1:{port}", process, log)
        found.wait_ready(machine.start_timeout)
        yield found
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and everything that it started: sends SIGTERM to it, then to the rest of its
    session (vLLM leaves its engine), then SIGKILL to what is left. Removes the files in /dev/shm
    that they leave behind."""
    shared = {file for each in _session(process) for file in _shared_files(each)}
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(STOP_TIMEOUT)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_TIMEOUT
        for each in _session(process):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        while _session(process) and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()
    for file in shared:
        file.unlink(missing_ok=True)


def _session(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Returns the running processes of the server's session."""

    def belongs(each: psutil.Process) -> bool:
        try:
            return os.getsid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    return [each for each in psutil.process_iter() if belongs(each)]


def _shared_files(process: psutil.Process) -> set[Path]:
    """Returns the existing files of /dev/shm that the process has mapped."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    names = (line[line.find("/dev/shm/") :] for line in lines if " /dev/shm/" in line)
    return {Path(name) for name in names if not name.endswith(" (deleted)")}


# ---- the servers ----


def pdserve(shape: str, machine: Machine) -> Server:
    """`NAME[@CHECKOUT]=FLAGS` of `pdserve up`."""
    name, _, flags = shape.partition("=")
    name, _, checkout = name.partition("@")
    folder = Path(checkout or ROOT).resolve()
    if not (folder / "pdserve").is_dir():
        raise Absent(f"{folder} is no checkout of pdserve")
    return Server(
        f"pdserve {name}",
        lambda port: [
            *(sys.executable, "-c", PDSERVE, "up", "--model", str(machine.model)),
            *("--served-model-name", "model", "--port", str(port), "--dtype", machine.dtype),
            *("--max-model-len", str(machine.max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)),
            *flags.split(),
        ],
        {"PYTHONPATH": str(folder)},
        {"ignore_eos": True},
    )


def vllm(venv: str | None, machine: Machine) -> Server:
    program = _program(venv, "vllm", "--vllm")
    return Server(
        "vLLM",
        lambda port: [
            *(program, "serve", str(machine.model), "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", machine.dtype),
            *("--max-model-len", str(machine.max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)),
        ],
        {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, machine.cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **_beside(program),
        },
        {"ignore_eos": True},
    )


def transformers(venv: str | None, machine: Machine) -> Server:
    program = _program(venv, "transformers", "--transformers")
    endless = {"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}
    return Server(
        "transformers serve",
        lambda port: [
            *(program, "serve", str(machine.model), "--continuous-batching"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", machine.dtype),
            *("--device", "cpu"),
        ],
        {"OMP_NUM_THREADS": str(machine.threads), "HF_HUB_OFFLINE": "1", **_beside(program)},
        {"generation_config": json.dumps(endless)},
        str(machine.model),
        says_done=False,
    )


def llama_cpp(program: str | None, gguf: str | None, machine: Machine) -> Server:
    """`llama-server`, whose models are GGUF files."""
    if program is None:
        raise Absent("name its llama-server by --llama-server or PEERS_LLAMA_SERVER")
    if not Path(program).is_file():
        raise Absent(f"there is no {program}")
    if gguf is None or not Path(gguf).is_file():
        raise Absent("name the model as GGUF by --gguf (python benchmarks/compared/gguf_model.py)")
    return Server(
        "llama.cpp",
        lambda port: [
            *(program, "--model", gguf, "--alias", "model", "--host", "127.0.0.1"),
            *("--port", str(port), "--threads", str(machine.threads)),
            *(
                "--parallel",
                str(MAX_NUM_SEQS),
                "--ctx-size",
                str(MAX_NUM_SEQS * machine.max_model_len),
            ),
        ],
        body={"ignore_eos": True},
    )


def generate_command(venv: str | None, machine: Machine) -> list[str]:
    """Returns the command of `generate.py`: transformers without a server, in tokens per second."""
    python = _program(venv, "python", "--transformers")
    script = Path(__file__).with_name("generate.py")
    return [python, str(script), str(machine.model), machine.dtype, str(machine.threads)]


def _program(venv: str | None, name: str, flag: str) -> str:
    if venv is None:
        raise Absent(f"name its virtual environment by {flag} or PEERS_{flag[2:].upper()}")
    path = Path(venv).absolute() / "bin" / name
    if not path.exists():
        raise Absent(f"there is no {path}")
    return str(path)


def _beside(program: str) -> dict[str, str]:
    """Returns a PATH with its virtual environment's programs first (such as ninja)."""
    return {"PATH": f"{Path(program).parent}:{os.environ.get('PATH', '')}"}
