"""A rank: `python -m pdserve.common.distributed.rank_main DIRECTORY RANK`, or a Ray actor.

It builds its worker, answers steps on the main thread and calls to the extension on another,
and ends when it is told to or when its node is gone. Terminal and supervisor signals are the
node's business: a rank ignores them, so that a node can drain.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.common.core.errors import NodeError
from pdserve.common.core.host import die_with_parent, leave, loading
from pdserve.common.core.plugins import import_string
from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import Worker, WorkerSpec
from pdserve.common.distributed.wire import Kind, Link, NodeAddress, encode_failure
from pdserve.common.obs.logging import setup_logging

logger = logging.getLogger(__name__)

FLUSH_MS = 1000

_specs = msgspec.msgpack.Decoder(WorkerSpec)
_seconds = msgspec.msgpack.Decoder(float)


class Outbox:
    """The rank's one way out; any thread may send. After `close`, nothing leaves any more."""

    def __init__(self, socket: zmq.Socket, rank: int) -> None:
        self._socket = socket
        self._rank = rank
        self._lock = threading.Lock()

    def send(self, kind: Kind, number: int, body: bytes) -> None:
        with self._lock:
            if not self._socket.closed:
                self._socket.send_multipart([wire.HEADER.pack(self._rank, kind, number), body])

    def emit(self, event: bytes) -> None:
        self.send(Kind.EVENT, 0, event)

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def fail(self, kind: Kind, number: int, error: Exception) -> None:
        self.send(kind, number, encode_failure(error, self._rank))


class LogForwarder(io.TextIOBase):
    """Standard error of a rank on another host: its node writes it among its own lines."""

    def __init__(self, out: Outbox) -> None:
        self._out = out

    def write(self, text: str) -> int:
        self._out.send(Kind.LOG, 0, text.encode())
        return len(text)


def main(directory: Path, rank: int) -> int:
    exit_with_node()
    path = wire.spec_path(directory, rank)
    spec = _specs.decode(path.read_bytes())
    path.unlink()  # it may hold secrets
    return run_rank(spec, wire.local_address(directory))


def run_rank(spec: WorkerSpec, node: NodeAddress) -> int:
    """Is the rank until the node says that it may end; returns its exit status. ZeroMQ's sockets
    are not safe between threads: each is closed by the one that uses it, or under its lock."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, FLUSH_MS)  # of every socket
    steps, calls, outward = (_connect(context, node, spec.rank, link) for link in Link)
    out = Outbox(outward, spec.rank)
    setup_logging(spec.role, spec.log, spec.rank, stream=LogForwarder(out) if node.key else None)
    try:
        with _exit_with_connection(steps) if node.key else nullcontext():
            return _run(spec, steps, calls, out)
    finally:
        steps.close()
        out.close()
        context.term()  # ends a wait for calls, too


def exit_with_node() -> None:
    """Ends this process when the node does: the kernel sends SIGKILL (Linux), and standard
    input, whose other end only the node holds, comes to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    threading.Thread(target=_exit_at_eof, name="node-watch", daemon=True).start()


def _exit_at_eof() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # the node is gone: there is nobody left to answer or to report to


def _connect(context: zmq.Context, node: NodeAddress, rank: int, link: Link) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    wire.remove_high_water_mark(socket)
    socket.setsockopt(zmq.ROUTING_ID, wire.routing_id(rank, link))
    if node.key:
        socket.curve_serverkey = node.key.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(node.url)
    if link is not Link.OUT:
        number = wire.start_number(rank, link)
        socket.send_multipart([wire.HEADER.pack(rank, Kind.RESULT, number), b""])
    return socket


@contextmanager
def _exit_with_connection(socket: zmq.Socket) -> Iterator[None]:
    """What `exit_with_node` does on one host: a node that is gone breaks its connections."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
    watch = threading.Thread(
        target=_exit_at_disconnect, args=(monitor,), name="node-watch", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        socket.disable_monitor()
        watch.join()


def _exit_at_disconnect(monitor: zmq.Socket) -> None:
    with monitor:
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            os._exit(1)


def _run(spec: WorkerSpec, steps: zmq.Socket, calls: zmq.Socket, out: Outbox) -> int:
    """Build, announce, serve, close. Returns the exit status."""
    number = wire.start_number(spec.rank, Link.OUT)
    try:
        with loading():
            factory = import_string(spec.factory)
        worker: Worker = factory(spec, out.emit)
        out.send(Kind.RESULT, number, worker.ready())
    except Exception as error:  # the boundary: whatever it was, the node hears it
        calls.close()
        out.fail(Kind.FAILURE, number, error)
        steps.recv_multipart()  # stay until stopped, so that the answer is read before the exit
        return 1
    server = threading.Thread(target=_serve_calls, args=(calls, worker, out), name="calls")
    server.start()
    _serve(steps, worker.step, out, on_error=Kind.BROKEN, answer=spec.rank == spec.output_rank)
    server.join()
    worker.close()
    return 0


def _serve_calls(calls: zmq.Socket, worker: Worker, out: Outbox) -> None:
    extension = worker.extension
    handle = extension.handle if extension is not None else _no_extension
    try:
        with calls:
            deadline = _serve(calls, handle, out, on_error=Kind.FAILURE)
        if extension is not None:
            extension.close(deadline)
    except Exception:  # a defect: calls would wait for ever, and nobody would notice
        logger.exception("calls are not served any more")
        os._exit(1)


def _no_extension(message: bytes) -> bytes:
    raise NodeError("this rank has no extension")


def _serve(
    requests: zmq.Socket,
    handle: Callable[[bytes], bytes],
    out: Outbox,
    on_error: Kind,
    answer: bool = True,
) -> float:
    """Serves until told to stop; returns the seconds granted for stopping. Without `answer`
    only errors are reported."""
    while True:
        head, body = requests.recv_multipart()
        (number,) = wire.NUMBER.unpack(head)
        if number == wire.STOP:
            return _seconds.decode(body)
        try:
            result = handle(body)
        except Exception as error:  # the boundary: every failure becomes a typed answer
            out.fail(on_error, number, error)
        else:
            if answer:
                out.send(Kind.RESULT, number, result)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2])))
