"""A whole cluster as a user starts it, `pdserve up` on free ports, and what tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from common.obs.ports import read_ports

MODELS = Path(__file__).parents[1] / "models"
START_TIMEOUT = 120.0
DEFAULTS = {
    "dtype": "float32",
    "num-gpu-blocks-override": "192",
    "max-num-batched-tokens": "64",  # so that prompts of a few hundred tokens take several steps
    "max-num-seqs": "16",
    "cpu-threads": "1",
    "queue-timeout": "20",
    "drain-timeout": "10",
}


class Cluster:
    """Use as a context manager. `options` are flags without dashes: `prefill_tp=2`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.model = Path(model) if "/" in str(model) else MODELS / model
        self._options = {
            **DEFAULTS,
            **{name.replace("_", "-"): str(value) for name, value in options.items()},
        }
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-test-")
        self.log_path = Path(self._folder.name) / "log"
        self.ports: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        ports_file = Path(self._folder.name) / "ports.json"
        pdserve = Path(sys.executable).with_name("pdserve")
        command = [str(pdserve), "up", "--model", str(self.model)]
        command += ["--port", "0", "--grpc-port", "0", "--ports-file", str(ports_file)]
        for name, value in self._options.items():
            command += [f"--{name}", value] if value != "" else [f"--{name}"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self.ports = self.wait_for(lambda: read_ports(ports_file), START_TIMEOUT)
            self.wait_for(lambda: self.get("/ready").status_code == 200, START_TIMEOUT)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._folder.cleanup()

    # ---- asking -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=10)

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """One whole completion, greedy unless told otherwise."""
        response = self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **body})
        assert response.status_code == 200, f"{response.text}\n{self.log()}"
        answer: dict[str, Any] = response.json()
        return answer

    def nodes(self, role: str | None = None) -> list[dict[str, Any]]:
        nodes = self.get("/v1/cluster").json()["nodes"]
        return [node for node in nodes if role in (None, node["role"])]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # ---- waiting ----------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], Any], timeout: float = 15.0) -> Any:
        """The condition's value once it is true; fails with the log when it stays false."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if value := condition():
                    return value
            except requests.ConnectionError:
                pass
            if self.process.poll() is not None:
                raise AssertionError(f"the cluster ended ({self.process.returncode})\n{self.log()}")
            time.sleep(0.05)
        raise AssertionError(f"still not true after {timeout} s\n{self.log()[-6000:]}")

    def wait_idle(self, timeout: float = 15.0) -> None:
        """Every block of every node is free again, by the nodes' own metrics."""
        self.wait_for(lambda: all(self._is_idle(node) for node in self.nodes()), timeout)

    def _is_idle(self, node: dict[str, Any]) -> bool:
        values = node_metrics(node)
        return (
            values["pdserve:kv_blocks_free"] == values["pdserve:kv_blocks_total"]
            and values["pdserve:num_requests_running"] == 0
            and values["pdserve:num_requests_waiting"] == 0
            and values["pdserve:num_requests_remote"] == 0
        )


def node_metrics(node: dict[str, Any]) -> dict[str, float]:
    """A node's metrics by name, labels included."""
    text = requests.get(f"http://{node['metrics_address']}/metrics", timeout=10).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
