"""Node processes that start in a moment: forked from one that has imported everything.

A fork is a process of its own, with its own sockets and memory, that can be killed or stopped
like any other; only the seconds that importing torch costs are spared.
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

from pdserve.common.core.host import loading
from pdserve.common.core.plugins import import_string

MAINS = {  # of each role, as `WarmStart.start` has it
    "router": "pdserve.router.__main__",
    "prefill_node": "pdserve.prefill_node.__main__",
    "decode_node": "pdserve.decode_node.__main__",
    "both_node": "pdserve.decode_node.both",
}
MORE = (
    "pdserve.router.server",
    "pdserve.router.api.preprocess_worker",
    "pdserve.decode_node.node",
    "pdserve.prefill_node.node",
    "benchmarks.warm_ranks",
    "pdserve.common.worker.worker",
    "pdserve.kv_transfer.connectors.shm",
    "pdserve.kv_transfer.connectors.tcp",
)
MESSAGE = 1 << 20  # bytes
FORKS = "benchmarks.warm_ranks:use"  # what a role starts


class WarmStart:
    """Starts processes until `close`, which ends all that are left."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, name: str | None = None
    ) -> None:
        """All of this host that give the same `name` share one process that forks; it has the
        environment of the first of them."""
        self._lock = threading.Lock()
        self._shared = name is not None
        self._parent: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0pdserve-warm-{name or uuid.uuid4()}"
        while not self._connected(address):
            with suppress(OSError), _listener(address) as listener:  # another one may be first
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
        """Imports what processes that start from now on need beside their roles."""
        self._ask("load", modules=modules)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process started here; negative: the signal; None: it still runs."""
        code: int | None = self._ask("exit_code", pid=pid)
        return code

    def _ask(self, what: str, **arguments: Any) -> Any:
        with self._lock:
            self._socket.send(json.dumps([what, arguments]).encode())
            return json.loads(self._socket.recv(MESSAGE))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv(MESSAGE)  # its end
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
    """Whether a process that `WarmStart` started still runs (or is stopped)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- the parent ----

_codes: dict[int, int | None] = {}  # of all that were started; None: it runs
_starters: dict[int, socket.socket] = {}  # by pid
_sockets = selectors.PollSelector()  # the listener's, and one for each `WarmStart`


def main() -> int:
    with loading():  # or each fork's collector writes to, and so copies, every page of it
        for module in (*MAINS.values(), *MORE):
            import_module(module)
    signal.signal(signal.SIGCHLD, _reap)
    faulthandler.register(signal.SIGUSR1)  # who asks all of a cluster for their stacks asks it, too
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
    """Answers one question, or none once the one who asks has ended."""
    answers: dict[str, Callable[..., Any]] = {
        "start": partial(_start, starter), "exit_code": _exit_code, "load": _load
    }  # fmt: skip
    try:
        question = starter.recv(MESSAGE)
    except ConnectionResetError:  # it ended before it read an answer
        question = b""
    if not question:
        _end(starter)
        return
    what, arguments = json.loads(question)
    with suppress(BrokenPipeError):
        starter.send(json.dumps(answers[what](**arguments)).encode())


def _end(starter: socket.socket) -> None:
    """Ends all processes that are left of a `WarmStart`."""
    _sockets.unregister(starter)
    for pid, other in _starters.items():
        if other is starter and _codes[pid] is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    starter.close()


def _reap(*_: object) -> None:
    """No zombies: whether a process lives can be seen from its pid."""
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
    # Nothing is reaped in between: the pid may be that of one that ended long ago.
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
    """A fork's environment cannot be seen from outside, its folder can: whoever gave it a TMPDIR
    of its own finds it by that."""
    os.environ.update(environment)
    if folder := environment.get("TMPDIR"):
        os.chdir(folder)
        tempfile.tempdir = None  # what was looked up before the fork


def _starts_others(role: str, flags: list[str]) -> bool:
    """A node of one rank does not: its zygote would cost as much as the fork of the node."""
    return role == "router" or (role in MAINS and any("parallel" in flag for flag in flags))


def _become(role: str, flags: list[str], log: str, before: list[str]) -> Any:
    """Goes on as the role; never returns."""
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
    except SystemExit as stop:  # of wrong flags
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
