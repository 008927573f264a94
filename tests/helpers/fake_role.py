"""A router or node that only behaves as `pdserve up` requires. It uses the standard library only,
so that it starts in milliseconds: `python fake_role.py ROLE --flag=value …`.

FAKE_<ROLE> sets its misbehaviour: `crash` (exit code 3), `crash-once` (the first time, by a
mark in FAKE_FOLDER), `misconfigured` (exit code 2), `leave` (exit code 0), `deaf` (ignores
SIGTERM), `busy` (drains for half a second), `failing` (answers with an error).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE, FLAGS = sys.argv[1], dict(flag[2:].partition("=")[::2] for flag in sys.argv[2:])
MODE = os.environ.get(f"FAKE_{ROLE.upper()}", "")
TIMELINE = {
    "queued": 0.001, "reserved": 0.002, "first_token": 0.052, "transferred": 0.06,
    "finished": 0.152, "cached_tokens": 4, "transfer_bytes": 2**20, "transfer_seconds": 0.001,
}  # fmt: skip
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Blue "}}]},
    {"choices": [{"index": 0, "delta": {"content": "light."}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        "pdserve": {"timeline": TIMELINE},
    },
]
nodes: list[socket.socket] = []
routers: list[socket.socket] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if len(nodes) >= 2 else 503)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500 if MODE == "failing" else 200)
        self.end_headers()
        for chunk in CHUNKS:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        pass


def say(text: str) -> None:
    print(text, flush=True)


def stop(*_: object) -> None:
    time.sleep(0.5 if MODE == "busy" else 0.0)
    say(f"{ROLE} drained")
    os._exit(0)


def misbehave() -> None:
    if MODE == "crash-once":
        mark = Path(os.environ["FAKE_FOLDER"], "crashed")
        if not mark.exists():
            mark.touch()
            os._exit(3)
    if MODE == "crash":
        os._exit(3)
    if MODE == "misconfigured":
        os._exit(2)
    if MODE == "leave":
        os._exit(0)


def serve_router() -> None:
    registry = socket.create_server(("127.0.0.1", int(FLAGS.get("registry-port", 8002))))
    http = ThreadingHTTPServer(("127.0.0.1", int(FLAGS.get("port", 8000))), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    if "ports-file" in FLAGS:
        draft = Path(FLAGS["ports-file"] + ".draft")
        ports = {"http": http.server_port, "grpc": 8001, "registry": registry.getsockname()[1]}
        draft.write_text(json.dumps(ports))
        draft.rename(FLAGS["ports-file"])
    while True:
        nodes.append(registry.accept()[0])


def serve_node() -> None:
    for router in FLAGS["router"].split(","):
        host, _, port = router.rpartition(":")
        routers.append(socket.create_connection((host, int(port))))
    while True:
        time.sleep(60)


signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "deaf" else stop)
say(f"{ROLE} pid {os.getpid()} flags {json.dumps(FLAGS)}")
say(f"{ROLE} options {[name for name in os.environ if name.startswith('PDSERVE_')]}")
misbehave()
serve_router() if ROLE == "router" else serve_node()
