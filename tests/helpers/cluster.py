"""Starts a whole cluster as a user does, with `up` or role by role, and sends requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import requests

from benchmarks.fleet import flags
from paths import MODELS
from pdserve.common.obs.process import read_ports
from processes import command

START_TIMEOUT = 300.0
ANSWER_TIMEOUT = 120.0  # seconds without a byte of an answer
STOP_TIMEOUT = 30.0
PAUSES = 0.03, 0.1  # seconds between two checks: the first, the longest
IDLE_PAUSE = 0.2  # the longest for checks that take 10 ms of CPU and stay true
DEFAULTS = {
    "dtype": "float32",
    "num_gpu_blocks_override": 192,
    "max_num_batched_tokens": 64,  # so that prompts of a few hundred tokens take several steps
    "max_num_seqs": 16,
    "cpu_threads": 1,
    "drain_timeout": 10,
    "peak_tflops": 0.05,  # skips the measurement, which takes half of a node's start
    "peak_bandwidth": 10,
}
UP_DEFAULTS = {"queue_timeout": 20, "restart": "no"}  # so that a death fails the test
MODEL_NAME = re.compile(r'model_name="[^"]*"')
METRIC = re.compile(r'([^#{ ]+)(?:\{(?:engine="(\d+)",?)?(.*)\})? (\S+)')


class Home:
    """A folder whose `tmp` is the TMPDIR of all processes started in it, by which processes and
    files that outlive their test are found."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-test-")
        self.path = Path(self._folder.name)
        self.tmp = self.path / "tmp"
        self.tmp.mkdir()
        # torch makes a folder here as soon as transformers' models are imported; it is not among
        # the files that are checked.
        self.environment = {
            "TMPDIR": str(self.tmp),
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
        }

    def start(
        self,
        command: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process in its own session, so that a test can signal all of it."""
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env={**os.environ, **self.environment, **(environment or {})},
            )

    def processes(self) -> list[psutil.Process]:
        """Returns the running processes that were started here."""
        return [each for each in psutil.process_iter() if self._owns(each)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            tmp = str(self.tmp)  # the working folder of forked processes
            ours = process.environ().get("TMPDIR") == tmp or process.cwd() == tmp
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def close(self) -> list[str]:
        """Ends remaining processes; returns descriptions of them and of left temporary files."""
        running = self.processes()
        left = [f"process {each.pid}: {each.name()}" for each in running]
        for process in running:
            with suppress(psutil.NoSuchProcess):  # it ended with another one
                process.kill()
        left += [f"file {path.name}" for path in self.tmp.iterdir()]
        self._folder.cleanup()
        return left


class Service:
    """A router with its nodes: sends requests and waits for states. Use as a context manager; on
    exit it checks that no process or file is left over."""

    def __init__(self, model: str | Path) -> None:
        self.model = Path(model) if "/" in str(model) else MODELS / model
        self.home = Home()
        self.log_path = self.home.path / "log"
        self.log_path.touch()  # readable before the first process writes to it
        self.ports: dict[str, int] = {}
        self.headers: dict[str, str] = {}  # of every request
        self.processes: dict[
            str, subprocess.Popen[bytes]
        ] = {}  # processes that must not end by themselves

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()
        log = self.log()
        left = self.home.close()
        assert error or not left, f"left over: {left}\n{log}"

    def stop(self, number: int = signal.SIGTERM) -> dict[str, int]:
        """Ends all processes; returns name → exit code."""
        processes, self.processes = self.processes, {}
        for process in processes.values():
            process.send_signal(number)
        return {name: ended(process) for name, process in processes.items()}

    # ---- requests ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def registry(self) -> str:
        return f"127.0.0.1:{self.ports['registry']}"

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=self.headers, timeout=60)

    def post(self, path: str, **body: Any) -> requests.Response:
        with self._no_hang():
            return requests.post(
                self.url + path, json=body, headers=self.headers, timeout=ANSWER_TIMEOUT
            )

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """Returns a completion that is not streamed, greedy by default."""
        response = self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **body})
        assert response.status_code == 200, f"{response.text}\n{self.log()}"
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, prompt: Any, **body: Any) -> Iterator[dict[str, Any]]:
        """Yields the events of a streamed completion, errors included; it must end with [DONE]."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **body}
        url = f"{self.url}/v1/completions"
        with (
            self._no_hang(),
            requests.post(url, json=body, stream=True, timeout=ANSWER_TIMEOUT) as response,
        ):
            assert response.status_code == 200, f"{response.text}\n{self.log()}"
            yield from events(response.iter_lines(chunk_size=1))

    @contextmanager
    def _no_hang(self) -> Iterator[None]:
        try:
            yield
        except (requests.ReadTimeout, requests.ConnectionError) as error:
            if "timed out" not in str(error).lower():  # within a stream the error is no ReadTimeout
                raise
            last_words = self._last_words()
            raise AssertionError(f"nothing in {ANSWER_TIMEOUT} s\n{last_words}") from error

    def nodes(self, role: str | None = None) -> list[dict[str, Any]]:
        nodes = self.get("/v1/cluster").json()["nodes"]
        return [node for node in nodes if role in (None, node["role"])]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # ---- waiting ----------------------------------------------------------------------------

    def wait_for(
        self, condition: Callable[[], Any], timeout: float = 60.0, longest: float = PAUSES[1]
    ) -> Any:
        """Returns the condition's value once it is true; fails with the log if it stays false.
        `longest`: most seconds between two checks."""
        deadline = time.monotonic() + timeout
        late, pause = False, PAUSES[0]
        while not late:
            late = time.monotonic() >= deadline  # then this check is the last
            try:
                if value := condition():
                    return value
            except (requests.ConnectionError, URLError, ConnectionError):
                pass
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended ({process.returncode})\n{self.log()}")
            time.sleep(pause)
            pause = min(1.25 * pause, longest)
        raise AssertionError(f"still not true after {timeout} s\n{self._last_words()}")

    def _last_words(self) -> str:
        """Returns the end of the log with the stacks of every process, to explain a hang."""
        log = self.log()
        for process in self.home.processes():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)  # until they have written their stacks
        return log[-6000:] + self.log()[len(log) :]

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.get("/ready").status_code == 200, START_TIMEOUT)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Waits until all blocks of all running nodes are free, by the nodes' metrics."""

        def idle() -> bool:
            return all(is_idle(node) for node in self.nodes() if node["state"] != "lost")

        self.wait_for(idle, timeout, IDLE_PAUSE)


class Cluster(Service):
    """`pdserve up`. `options` are flags without dashes: `prefill_tp=2`; an empty value is a
    switch. `program` is another `pdserve` than this Python's; it runs in `home`."""

    def __init__(
        self,
        model: str | Path,
        environment: Mapping[str, str] | None = None,
        program: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model)
        self._program = program
        self._options = {**DEFAULTS, **UP_DEFAULTS, **options}
        self._environment = environment

    def __enter__(self) -> Cluster:
        ports_file = self.home.path / "ports.json"
        pdserve = self._program or Path(sys.executable).with_name("pdserve")
        command = [str(pdserve), "up", "--model", str(self.model)]
        command += ["--port", "0", "--grpc-port", "0", "--ports-file", str(ports_file)]
        command += flags(self._options)
        cwd = self.home.path if self._program else None
        self.processes["up"] = self.home.start(command, self.log_path, self._environment, cwd)
        try:
            self.ports = self.wait_for(lambda: read_ports(ports_file), START_TIMEOUT)
            self.wait_ready()
        except BaseException:
            self.stop()
            self.home.close()
            raise
        return self

    def node_process(self, role: str) -> psutil.Process | None:
        """Returns the first node of a role, if it is running; its ranks are its children."""
        children = psutil.Process(self.processes["up"].pid).children()
        return next((child for child in children if f"pdserve.{role}_node" in command(child)), None)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process, or kills it; returns its exit code."""
    try:
        return process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the JSON of server-sent events up to [DONE], which must come last."""
    done = False
    for line in filter(None, lines):
        assert not done, f"{line!r} after [DONE]"
        assert line.startswith(b"data: "), line
        if line == b"data: [DONE]":
            done = True
        else:
            yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"


def text_of(stream: Iterator[dict[str, Any]]) -> str:
    """Returns the text of a streamed completion; an error event fails the test."""
    return "".join(each["choices"][0]["text"] for each in stream if each["choices"])


def node_metrics(node: dict[str, Any], engine: int | None = None) -> dict[str, float]:
    """Returns a node's metrics by name with labels, but without `model_name` and `engine`: of one
    replica, or summed over all."""
    with urlopen(f"http://{node['metrics_address']}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    values: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if found := METRIC.fullmatch(MODEL_NAME.sub("", line)):
            name, of_engine, rest, value = found.groups()
            rest = rest and rest.strip(",")
            if engine is None or of_engine in (None, str(engine)):
                values[f"{name}{{{rest}}}" if rest else name] += float(value)
    return dict(values)


def ask_until_preempted(node: dict[str, Any], ask: Callable[[], object]) -> None:
    """Repeats `ask` until the node has preempted a sequence: on a stalled machine, concurrent
    requests are sometimes computed one after the other."""

    def preemptions() -> float:
        return node_metrics(node)["pdserve_num_preemptions_total"]

    before = preemptions()
    for _ in range(5):
        ask()
        if preemptions() > before:
            return
    raise AssertionError("no sequence was preempted")


def is_idle(node: dict[str, Any]) -> bool:
    values = node_metrics(node)
    return (
        values["pdserve_kv_blocks_free"] == values["pdserve_kv_blocks"]
        and values["pdserve_num_requests_running"] == 0
        and values["pdserve_num_requests_waiting"] == 0
        and values["pdserve_num_requests_remote"] == 0
    )
