"""A Ray cluster of several raylets on this host, with everything it owns in one folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.fleet import free_port
from benchmarks.hosts import Network
from pdserve.common.distributed.environment import address_towards
from processes import alive

START_TIMEOUT = 800.0  # seconds
# Otherwise Ray would run workers at low priority, and prestart some.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class Raylets:
    """`raylets` of `cpus` each; the first one has the cluster's head. Use as a context manager,
    which ends every process of the cluster. `hidden`: a folder that is empty on all hosts but the
    first. `network`: each raylet runs on a host of its own there; `hosts` has the addresses."""

    def __init__(
        self,
        raylets: int = 2,
        cpus: int = 2,
        hidden: Path | None = None,
        network: Network | None = None,
    ) -> None:
        self._count, self._cpus, self._network = raylets, cpus, network
        self.hosts = [network.add_routed() for _ in range(raylets)] if network else []
        hide = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
        self._hide = hide if hidden else []
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")
        self._started: list[subprocess.Popen[bytes]] = []  # each with a session of its own
        head = (
            self.hosts[0] if network else address_towards("udp://8.8.8.8")
        )  # the address that Ray chooses
        self.address = f"{head}:{free_port()}"

    def __enter__(self) -> Raylets:
        try:
            ports = [f"--ray-client-server-port={free_port()}", "--include-dashboard=false"]
            port = self.address.rpartition(":")[2]
            self._start("--head", f"--port={port}", *ports, f"--temp-dir={self._folder.name}")
            for _ in range(1, self._count):
                self.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def join(self) -> None:
        """Starts another raylet."""
        self._start(f"--address={self.address}")

    def _start(self, *options: str) -> None:
        ray = Path(sys.executable).with_name("ray")
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"]
        fixed = [f"--num-cpus={self._cpus}", "--num-gpus=0", "--object-store-memory=80000000"]
        log = Path(self._folder.name, f"start.{len(self._started)}")
        hide = self._hide if self._started else []
        if self._network:
            host = self.hosts[len(self._started)]
            hide = ["nsenter", "-t", str(self._network.pid(host)), "-n", *hide]
            fixed.append(f"--node-ip-address={host}")
        command = [*hide, str(ray), "start", "--block", "--disable-usage-stats", *fixed, *ports]
        command.extend(options)
        process = self._launch(command, log)
        self._started.append(process)
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            ended = process.poll() is not None
            output = log.read_bytes()
            if b"now block" in output:
                return
            assert time.monotonic() < deadline, output.decode()
            if ended:
                # Ray allows a raylet 30 seconds, which may be too short on a busy host.
                assert b"timed out during startup" in output, output.decode()
                self._end([process])
                process = self._started[-1] = self._launch(command, log)
            time.sleep(0.05)

    def _launch(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )

    def kill(self, number: int, name: str = "raylet") -> None:
        """Sends SIGKILL to a process of the `number`-th start."""
        children = psutil.Process(self._started[number].pid).children()
        next(child for child in children if child.name() == name).kill()

    def __exit__(self, *_: object) -> None:
        self._end(self._started)
        self._folder.cleanup()

    def _end(self, started: Sequence[subprocess.Popen[bytes]]) -> None:
        sessions = {process.pid for process in started}
        while running := [each for each in psutil.process_iter() if _session(each.pid) in sessions]:
            for process in running:  # twice, since a process may have been starting others
                with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    process.kill()
            psutil.wait_procs(running, 5)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid) if alive(pid) else None
    except ProcessLookupError:
        return None
