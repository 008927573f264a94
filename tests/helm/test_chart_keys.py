"""The Secret of keys: random where the user has none, and the same after an upgrade."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from chart import CHART, NODES, RELEASE, needs_helm, pods, render, run_helm


def secrets(made: Sequence[Any]) -> dict[str, str]:
    """Entries of the Secret, if there is one."""
    return {
        name: base64.b64decode(value).decode()
        for each in made
        if each["kind"] == "Secret"
        for name, value in each["data"].items()
    }


@needs_helm
def test_keys_are_made_or_taken() -> None:
    made = secrets(render())
    assert made.keys() == {"cluster-key", "api-key", "admin-api-key"}
    assert len(made["cluster-key"]) >= 32 and len(set(made.values())) == 3
    assert secrets(render("gpu.yaml")) == {}
    for component, pod in pods("gpu.yaml").items():
        env = pod["spec"]["containers"][0]["env"]
        named = [
            e["valueFrom"]["secretKeyRef"] for e in env if "secretKeyRef" in e.get("valueFrom", {})
        ]
        assert {each["name"] for each in named} == {"pdserve-keys"}, component
        assert component not in NODES or {each["key"] for each in named} == {"cluster-key"}


@needs_helm
def test_without_keys_of_clients_everybody_may_ask() -> None:
    made = render("", **{"keys.clients": "false"})
    assert secrets(made).keys() == {"cluster-key"}
    assert "API_KEY" not in json.dumps(made)


KEPT = {"cluster-key": "cHJlY2lvdXM=", "api-key": "c2stMQ=="}


class FakeServer(BaseHTTPRequestHandler):
    """Has as much of Kubernetes' API as `lookup` needs; it has a Secret of keys."""

    def do_GET(self) -> None:
        secret = {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "x"},
            "data": KEPT,
        }
        resource = {"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}
        known: dict[str, Any] = {
            "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
            f"/api/v1/namespaces/default/secrets/{RELEASE}-pdserve-keys": secret,
        }
        body = known.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body or {"kind": "Status", "code": 404}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@needs_helm
def test_an_upgrade_keeps_the_keys() -> None:
    """Keys that are in the cluster stay; missing ones are made."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            said = run_helm(
                "template", RELEASE, str(CHART), "--dry-run=server", "--kube-apiserver", url,
                "--kube-version", "1.32", "--show-only", "templates/secret.yaml",
            )  # fmt: skip
        finally:
            server.shutdown()
    made = secrets([yaml.safe_load(said)])
    assert (made["cluster-key"], made["api-key"]) == ("precious", "sk-1")
    assert made["admin-api-key"].startswith("sk-admin-")
