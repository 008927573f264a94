"""A model hub on this host, with the part of the API that `huggingface_hub` needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "5" * 40
TOKEN = "hf_ofthetests"


@dataclass
class Hub:
    """A running hub: name → folder. Names that begin with `gated/` need the token."""

    repos: Mapping[str, Path]
    url: str = ""
    downloads: list[str] = field(default_factory=list)


@contextmanager
def running_hub(repos: Mapping[str, Path], host: str = "127.0.0.1") -> Iterator[Hub]:
    hub = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            org, name, *rest = parts[2:] if api else parts
            folder = repos.get(f"{org}/{name}")
            if folder is None:
                self._refuse(404, "RepoNotFound")
            elif org == "gated" and TOKEN not in (self.headers["Authorization"] or ""):
                self._refuse(403, "GatedRepo")
            elif rest[1:2] not in (["main"], [COMMIT]):
                self._refuse(404, "RevisionNotFound")
            elif rest[0] == "revision":
                self._json({"id": f"{org}/{name}", "sha": COMMIT, "siblings": []})
            elif rest[0] == "tree":
                self._json([_entry(folder, path) for path in sorted(folder.rglob("*"))])
            else:
                self._file(folder / "/".join(rest[2:]))

        def _json(self, body: object) -> None:
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _file(self, path: Path) -> None:
            if self.command == "GET":
                hub.downloads.append(path.name)
            headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT}
            self._answer(200, path.read_bytes(), headers)

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://{host}:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Sets the effects of HF_ENDPOINT and HF_HUB_CACHE in this running process."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setenv("HF_HUB_CACHE", str(cache))


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
