"""One process of a local cluster, in its own session, with its output forwarded line by line."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pdserve.common.core.host import die_with_parent, role_environment

Write = Callable[[str, str], None]
"""Shows one output line: (process name, line)."""

OUTPUT_GRACE = 2.0  # seconds a pipe may stay open after its process has ended


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command of a child process. `environment` is added to this process's environment without
    its PDSERVE_ options: children get options only from flags."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A process that can be started again after `wait`. `terminate` asks it to drain; `kill` ends
    it and everything it started."""

    def __init__(self, spec: ChildSpec, write: Write) -> None:
        self.spec = spec
        self.write = write
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._cleared = True  # whether the last process and its group are known to be gone

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process. A previous one must have been waited for."""
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=role_environment({"PYTHONUNBUFFERED": "1", **self.spec.environment}),
            # Ctrl-C in the terminal reaches the parent only, which then drains in order.
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid()),
        )
        self._cleared = False
        assert self._process.stdout is not None
        self._output = asyncio.create_task(self._forward(self._process.stdout))

    async def wait(self) -> int:
        """Waits for the process, kills what is left of its group, and returns its exit code
        (negative: the signal)."""
        if self._process is None or self._output is None:
            return 0
        code = await self._process.wait()
        if not self._cleared:
            self._signal_group(signal.SIGKILL)  # ranks that outlived their node
            self._cleared = True  # the kernel may reuse the group's number
            await asyncio.wait([self._output], timeout=OUTPUT_GRACE)
            self._output.cancel()
        return code

    def terminate(self) -> None:
        if self.running and self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self.running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.write(self.name, line.decode(errors="replace"))
        if rest:
            self.write(self.name, rest.decode(errors="replace"))


def _die_with(parent: int) -> None:
    """Runs in the child before exec: the child ends when `parent` does."""
    die_with_parent()
    if os.getppid() != parent:  # the parent died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
