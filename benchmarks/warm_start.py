"""Starts node processes quickly, by forking a process that has imported everything.

A fork is a process with its own sockets and memory, and can be killed or stopped like any other; it
only saves the seconds of importing torch.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from pdserve.common.config.options import options
from pdserve.common.config.sources import ROLE_CONFIGS
from pdserve.common.core.host import loading
from pdserve.common.core.plugins import import_string

MAINS = {  # role → main module, for `WarmStart.start`
    "router": "pdserve.router.__main__",
    "prefill_node": "pdserve.prefill_node.__main__",
    "decode_node": "pdserve.decode_node.__main__",
    "both_node": "pdserve.decode_node.both",
}
MORE = (
    "pdserve.router.server",
    "pdserve.demo_model.embedded",
    "pdserve.router.api.preprocess_worker",
    "pdserve.decode_node.node",
    "pdserve.prefill_node.node",
    "benchmarks.warm_ranks",
    "pdserve.common.worker.worker",
    "pdserve.kv_transfer.connectors.shm",
    "pdserve.kv_transfer.connectors.tcp",
)
MESSAGE = 1 << 20  # bytes
FORKS = "benchmarks.warm_ranks:use"  # called in a role that starts other processes


class WarmStart:
    """Starts processes; `close` ends the remaining ones."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, name: str | None = None
    ) -> None:
        """All users on this host with the same `name` share one forking process, which has the
        environment of the first of them."""
        self._lock = threading.Lock()
        self._shared = name is not None
        self._parent: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0pdserve-warm-{name or uuid.uuid4()}"
        while not self._connected(address):
            with suppress(OSError), _listener(address) as listener:  # another process may be first
                self._parent = _start_parent(listener, environment or {})

    def _connected(self, address: str) -> bool:
        try:
            self._socket.connect(address)
        except ConnectionRefusedError:
            return False
        return True

    def start(
        self,
        role: str,
        flags: list[str],
        log: Path,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Runs the role (of MAINS, or a module with a `main`), appending its output to `log`;
        returns its pid. `before` is a function to call first in the process, as `module:name`, and
        its arguments."""
        more = {"before": [*before], "environment": dict(environment or {})}
        pid: int = self._ask("start", role=role, flags=flags, log=str(log), **more)
        return pid

    def load(self, *modules: str) -> None:
        """Imports modules that later processes need besides their roles' modules."""
        self._ask("load", modules=modules)

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a process (negative: a signal); None: it is running."""
        code: int | None = self._ask("exit_code", pid=pid)
        return code

    def _ask(self, what: str, **arguments: Any) -> Any:
        with self._lock:
            self._socket.send(json.dumps([what, arguments]).encode())
            return json.loads(self._socket.recv(MESSAGE))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv(MESSAGE)  # waits for its end
        self._socket.close()
        if self._parent and not self._shared:
            self._parent.wait()


def _listener(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _start_parent(
    listener: socket.socket, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        env={**os.environ, **environment},
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    """Returns whether a process that `WarmStart` started is running or stopped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- the parent ----

_codes: dict[int, int | None] = {}  # pid → exit code; None: it is running
_starters: dict[int, socket.socket] = {}  # pid → socket of its starter
_sockets = selectors.PollSelector()  # the listener's, and one per `WarmStart`


def main() -> int:
    with loading():  # otherwise each fork's garbage collector would copy all pages
        for module in (*MAINS.values(), *MORE):
            import_module(module)
        for config in ROLE_CONFIGS:
            tuple(options(config()))  # reads the types of all options
    signal.signal(signal.SIGCHLD, _reap)
    faulthandler.register(
        signal.SIGUSR1
    )  # a request for all stacks of a cluster reaches this process too
    listener = socket.socket(fileno=int(sys.argv[1]))
    _sockets.register(listener, selectors.EVENT_READ, _accept)
    while ready := _sockets.select(None if len(_sockets.get_map()) > 1 else 0):
        for key, _ in ready:
            key.data(key.fileobj)
    return 0


def _accept(listener: socket.socket) -> None:
    starter, _ = listener.accept()
    _, user, _ = struct.unpack("3i", starter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user == os.geteuid():
        _sockets.register(starter, selectors.EVENT_READ, _serve)
    else:
        starter.close()


def _serve(starter: socket.socket) -> None:
    """Serves one request, or cleans up once the requester has ended."""
    answers: dict[str, Callable[..., Any]] = {
        "start": partial(_start, starter), "exit_code": _exit_code, "load": _load
    }  # fmt: skip
    try:
        question = starter.recv(MESSAGE)
    except ConnectionResetError:  # the requester has ended
        question = b""
    if not question:
        _end(starter)
        return
    what, arguments = json.loads(question)
    with suppress(BrokenPipeError):
        starter.send(json.dumps(answers[what](**arguments)).encode())


def _end(starter: socket.socket) -> None:
    """Ends all remaining processes of a `WarmStart`."""
    _sockets.unregister(starter)
    for pid, other in _starters.items():
        if other is starter and _codes[pid] is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    starter.close()


def _reap(*_: object) -> None:
    """Reaps ended processes, so that a pid shows whether its process is alive."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _load(modules: list[str]) -> None:
    with loading():
        for module in modules:
            import_module(module)


def _exit_code(pid: int) -> int | None:
    return _codes[pid]


def _start(
    starter: socket.socket,
    role: str,
    flags: list[str],
    log: str,
    before: list[str],
    environment: dict[str, str],
) -> int:
    # Nothing is reaped in between, since a pid may be reused.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for key in _sockets.get_map().values():
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        _move(environment)
        _become(role, flags, log, before)
    _codes[pid], _starters[pid] = None, starter
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    return pid


def _move(environment: dict[str, str]) -> None:
    """Moves to the folder of the environment's TMPDIR: it can be seen from outside the process,
    unlike a fork's environment."""
    os.environ.update(environment)
    if folder := environment.get("TMPDIR"):
        os.chdir(folder)
        tempfile.tempdir = None  # drops the value cached before the fork


def _starts_others(role: str, flags: list[str]) -> bool:
    """Returns whether the role starts other processes; a node with one rank does not."""
    return role == "router" or (role in MAINS and any("parallel" in flag for flag in flags))


def _become(role: str, flags: list[str], log: str, before: list[str]) -> Any:
    """Runs the role in this process; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
            os.dup2(stream, target)
        sys.stdin, sys.argv = open(0), [role, *flags]  # noqa: SIM115
        if before:
            import_string(before[0])(*before[1:])
        zygote = import_string(FORKS)(role) if _starts_others(role, flags) else None
        code = int(import_module(MAINS.get(role, role)).main(flags))
        if zygote:
            zygote.close()
    except SystemExit as stop:  # raised for wrong flags
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
