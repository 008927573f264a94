"""A toy worker for tests of executors. Ranks' processes import this file, so it imports little."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.common.core.errors import Blame, ConfigError, TransferError
from pdserve.common.distributed.executor import Emit, WorkerSpec

FOR_EVER = 60.0  # seconds; a test that waits so long has failed


class ToyExtension:
    def __init__(self, rank: int, emit: Emit) -> None:
        self.rank = rank
        self.emit = emit
        self.go = threading.Event()
        self.over = threading.Event()  # set when the rank closes

    def handle(self, message: bytes) -> bytes:
        if message == b"thread":
            return threading.current_thread().name.encode()
        if message.endswith(b"raise"):
            raise TransferError("no such peer", code="PEER_LOST", blame=Blame.PREFILL)
        if message == b"emit":
            self.emit(b"event")
        if message == b"go":
            self.go.set()
        return b"call %d %s" % (self.rank, message)

    def handle_at_once(self, message: bytes) -> bytes | None:
        return self.handle(message) if message in (b"thread", b"short raise") else None

    def close(self, deadline: float) -> None:
        self.over.set()
        if path := os.environ.get("TOY_CLOSED"):
            Path(path, f"extension.{self.rank}").write_text(str(deadline))


class ToyWorker:
    """Fails as `config` says. `extension`: whether it has one. `fail_rank`, `exit_rank`: ranks that
    raise or exit at their start. `late_rank`: a rank that starts when the file `late_until`
    exists."""

    def __init__(self, spec: WorkerSpec, emit: Emit) -> None:
        self.rank = spec.rank
        self.extension = ToyExtension(spec.rank, emit) if spec.config.get("extension") else None
        if spec.config.get("fail_rank") == spec.rank:
            raise ConfigError("no such folder", code="NO_MODEL")
        if spec.config.get("late_rank") == spec.rank:
            wait_for_file(Path(spec.config["late_until"]))
        if spec.config.get("exit_rank") == spec.rank:
            os._exit(7)

    def ready(self) -> bytes:
        return b"%d %d" % (self.rank, os.getpid())

    def step(self, message: bytes) -> bytes | Callable[[], bytes]:
        """Runs a command.

        wait      waits until the extension gets "go"
        raise R   rank R raises; the others wait until they close, so none answers before
        exit R    rank R exits
        later X   X, as a step that the next one does not wait for
        """
        command, _, argument = message.partition(b" ")
        if command == b"later":
            return lambda: self._step(argument)
        return self._step(message)

    def _step(self, message: bytes) -> bytes:
        command, _, argument = message.partition(b" ")
        if command == b"wait" and self.extension is not None:
            self.extension.go.wait(FOR_EVER)
        if command == b"raise":
            if int(argument) == self.rank:
                raise ValueError("bad batch")
            assert self.extension is not None
            self.extension.over.wait(FOR_EVER)
        if command == b"exit" and int(argument) == self.rank:
            os._exit(3)
        return b"step %d %s" % (self.rank, message)

    def close(self) -> None:
        if path := os.environ.get("TOY_CLOSED"):
            Path(path, f"worker.{self.rank}").touch()


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + FOR_EVER
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def specs(size: int = 2, **config: Any) -> list[WorkerSpec]:
    config = {"extension": True, **config}
    return [WorkerSpec(f"{__name__}:ToyWorker", rank, size, "", config) for rank in range(size)]
