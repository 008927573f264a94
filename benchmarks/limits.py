"""Measures this host's limits: a plain memory copy and a plain loopback socket."""

from __future__ import annotations

import socket
import statistics
import threading
import time

import numpy as np


def memcpy_limit(seconds: float) -> float:
    """Returns the GB/s of one thread that copies 64 MiB."""
    source, target = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return len(source) / statistics.median(times) / 1e9


def socket_limit(seconds: float) -> float:
    """Returns the GB/s of a loopback TCP stream between two threads, in 1 MiB writes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    data, buffer, total = bytes(1 << 20), bytearray(1 << 20), 0

    def send() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sender.sendall(data)
        sender.close()

    thread = threading.Thread(target=send)
    started = time.perf_counter()
    thread.start()
    while count := receiver.recv_into(buffer):
        total += count
    thread.join()
    receiver.close()
    return total / (time.perf_counter() - started) / 1e9
