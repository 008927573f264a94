"""A rank's process: `python -m pdserve.common.distributed.rank_main DIRECTORY RANK`, or a Ray
actor.

It builds its worker, serves steps on the main thread and calls to the extension on another one,
and ends when its node stops it or is gone. It ignores SIGINT and SIGTERM, so that its node can
drain.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.common.core.errors import NodeError
from pdserve.common.core.host import die_with_parent, leave, loading
from pdserve.common.core.plugins import import_string
from pdserve.common.core.waits import saying
from pdserve.common.distributed import wire
from pdserve.common.distributed.executor import Worker, WorkerSpec
from pdserve.common.distributed.wire import Link, NodeAddress, RankMessage, encode_failure
from pdserve.common.obs.logging import setup_logging

logger = logging.getLogger(__name__)

FLUSH_MS = 1000

_specs = msgspec.msgpack.Decoder(WorkerSpec)
_seconds = msgspec.msgpack.Decoder(float)


class Outbox:
    """The rank's outgoing socket. Thread-safe; after `close` it drops everything."""

    def __init__(self, socket: zmq.Socket, rank: int) -> None:
        self._socket = socket
        self._rank = rank
        self._lock = threading.Lock()

    def send(self, kind: RankMessage, number: int, body: bytes) -> None:
        with self._lock:
            if not self._socket.closed:
                self._socket.send_multipart([wire.HEADER.pack(self._rank, kind, number), body])

    def emit(self, event: bytes) -> None:
        self.send(RankMessage.EVENT, 0, event)

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def fail(self, kind: RankMessage, number: int, error: Exception) -> None:
        self.send(kind, number, encode_failure(error, self._rank))


class LogForwarder(io.TextIOBase):
    """Sends the log of a rank on another host to its node, which writes it."""

    def __init__(self, out: Outbox) -> None:
        self._out = out

    def write(self, text: str) -> int:
        self._out.send(RankMessage.LOG, 0, text.encode())
        return len(text)


def main(directory: Path, rank: int) -> int:
    exit_with_node()
    path = wire.spec_path(directory, rank)
    spec = _specs.decode(path.read_bytes())
    path.unlink()  # it may contain secrets
    return run_rank(spec, wire.local_address(directory))


def run_rank(spec: WorkerSpec, node: NodeAddress) -> int:
    """Runs the rank until the node stops it; returns its exit status. ZeroMQ's sockets are not
    thread-safe: each is closed by the thread that uses it, or under its lock."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, FLUSH_MS)  # for every socket
    steps, calls, outward = (_connect(context, node, spec.rank, link) for link in Link)
    out = Outbox(outward, spec.rank)
    setup_logging(spec.role, spec.log, spec.rank, stream=LogForwarder(out) if node.key else None)
    try:
        with _exit_with_connection(steps) if node.key else nullcontext():
            return _run(spec, steps, calls, out)
    finally:
        steps.close()
        out.close()
        context.term()  # also ends the wait for calls


def exit_with_node() -> None:
    """Ends this process when the node ends: by the kernel's SIGKILL (Linux), and by EOF on standard
    input, whose other end only the node holds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    threading.Thread(target=_exit_at_eof, name="node-watch", daemon=True).start()


def _exit_at_eof() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # the node is gone, so there is nothing to clean up or report


def _connect(context: zmq.Context, node: NodeAddress, rank: int, link: Link) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    wire.remove_high_water_mark(socket)
    socket.setsockopt(zmq.ROUTING_ID, wire.routing_id(rank, link))
    if node.key:
        socket.curve_serverkey = node.key.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        # A link that is cut, or a host that stands still, closes no connection.
        socket.heartbeat_timeout = int(1000 * node.timeout)
        socket.heartbeat_ivl = socket.heartbeat_timeout // 3
    socket.connect(node.url)
    if link is not Link.OUT:
        number = wire.start_number(rank, link)
        socket.send_multipart([wire.HEADER.pack(rank, RankMessage.RESULT, number), b""])
    return socket


@contextmanager
def _exit_with_connection(socket: zmq.Socket) -> Iterator[None]:
    """Ends this process when the connection to the node breaks; for nodes on other hosts."""
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
    """Builds the worker, announces it, serves, closes. Returns the exit status."""
    number = wire.start_number(spec.rank, Link.OUT)
    try:
        wire.check_version(spec.version)
        with saying("importing torch and its libraries"), loading():
            factory = import_string(spec.factory)
        worker: Worker = factory(spec, out.emit)
        out.send(RankMessage.RESULT, number, worker.ready())
    except Exception as error:  # any failure must reach the node
        calls.close()
        out.fail(RankMessage.FAILURE, number, error)
        steps.recv_multipart()  # wait for the stop, so that the node reads the answer first
        return 1
    server = threading.Thread(target=_serve_calls, args=(calls, worker, out), name="calls")
    server.start()
    _serve(
        steps, worker.step, out, on_error=RankMessage.BROKEN, answer=spec.rank == spec.output_rank
    )
    server.join()
    worker.close()
    return 0


def _serve_calls(calls: zmq.Socket, worker: Worker, out: Outbox) -> None:
    extension = worker.extension
    handle = extension.handle if extension is not None else _no_extension

    def answer(message: bytes) -> bytes:
        return wire.PING if message == wire.PING else handle(message)

    try:
        with calls:
            deadline = _serve(calls, answer, out, on_error=RankMessage.FAILURE)
        if extension is not None:
            extension.close(deadline)
    except Exception:  # otherwise calls would hang without a log line
        logger.exception("calls cannot be served any more")
        os._exit(1)


def _no_extension(message: bytes) -> bytes:
    raise NodeError("this rank has no extension")


def _serve(
    requests: zmq.Socket,
    handle: Callable[[bytes], bytes | Callable[[], bytes]],
    out: Outbox,
    on_error: RankMessage,
    answer: bool = True,
) -> float:
    """Serves until the stop message; returns its deadline in seconds. Without `answer` it only
    reports errors. Another thread waits for results that come later (`Worker.step`)."""

    def serve(number: int, work: Callable[[], bytes | Callable[[], bytes]]) -> None:
        try:
            result = work()
        except Exception as error:  # every failure becomes a typed answer
            out.fail(on_error, number, error)
            return
        if not isinstance(result, bytes):
            later.submit(serve, number, result)
        elif answer:
            out.send(RankMessage.RESULT, number, result)

    with ThreadPoolExecutor(1, thread_name_prefix="answers") as later:
        while True:
            head, body = requests.recv_multipart()
            (number,) = wire.NUMBER.unpack(head)
            if number == wire.STOP:
                return _seconds.decode(body)
            serve(number, partial(handle, body))


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2])))
