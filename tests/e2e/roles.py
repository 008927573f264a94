"""Roles started alone, as on separate hosts: `python -m router | prefill_node | decode_node`."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from cluster import MODELS

NODE_OPTIONS = {
    "dtype": "float32",
    "num-gpu-blocks-override": "192",
    "max-num-batched-tokens": "64",
    "max-num-seqs": "16",
    "cpu-threads": "1",
    "drain-timeout": "20",
}


def free_port() -> int:
    """A port nobody listens on now; for servers that must come back on the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Role:
    """One process of a role and its log."""

    def __init__(self, folder: Path, name: str, module: str, **options: Any) -> None:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *flags], stdout=log, stderr=subprocess.STDOUT
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)

    def running(self) -> bool:
        return self.process.poll() is None


class Host:
    """Starts roles and, at the end, kills what is left of them."""

    def __init__(self, model: str = "llama-gqa", **routing: Any) -> None:
        self.model = MODELS / model
        self.routing = {"queue_timeout": 15, "heartbeat_interval": 0.2, **routing}
        self.http, self.grpc = free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-test-")
        self._roles: list[Role] = []

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for role in self._roles:
            if role.running():
                role.process.kill()
            role.wait()
        self._folder.cleanup()

    def router(self, **options: Any) -> Role:
        ports = {"port": self.http, "grpc_port": self.grpc}
        return self._start("router", "router", **ports, **self.routing, **options)

    def prefill(self, **options: Any) -> Role:
        return self._node("prefill", **options)

    def decode(self, **options: Any) -> Role:
        return self._node("decode", **options)

    def _node(self, role: str, **options: Any) -> Role:
        defaults = {name.replace("-", "_"): value for name, value in NODE_OPTIONS.items()}
        router = {"router": f"127.0.0.1:{self.grpc}"}
        return self._start(role, f"{role}_node", **{**defaults, **router, **options})

    def _start(self, name: str, module: str, **options: Any) -> Role:
        options = {"model": self.model, "served_model_name": "m", **options}
        name = f"{name}-{len(self._roles)}"
        self._roles.append(Role(Path(self._folder.name), name, module, **options))
        return self._roles[-1]

    # ---- asking -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def ready(self) -> bool:
        return requests.get(f"{self.url}/ready", timeout=5).status_code == 200

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = requests.get(f"{self.url}/v1/cluster", timeout=5).json()[
            "nodes"
        ]
        return found

    def complete(self, prompt: Any, **body: Any) -> requests.Response:
        body = {"prompt": prompt, "temperature": 0, **body}
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def wait_for(self, condition: Callable[[], Any], timeout: float = 60) -> Any:
        """The condition's value once it is true."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if value := condition():
                    return value
            except requests.ConnectionError:
                pass
            time.sleep(0.05)
        logs = "\n".join(role.log()[-2000:] for role in self._roles)
        raise AssertionError(f"still not true after {timeout} s\n{logs}")
