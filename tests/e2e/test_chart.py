"""The Helm chart's pods as processes, each with an address and a file system of its own: `helm
test` is green, no pod calls a port that the policies close, and pods end as they are told."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks import hosts
from benchmarks.hosts import Network
from chart import allowed, needs_helm, render
from hub import TOKEN, running_hub
from kubelet import START_TIMEOUT, Kubelet, Pod
from paths import MODELS
from pdserve.cli import certs
from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.embedded import find_gguf

pytestmark = [pytest.mark.slow, needs_helm]
ROLES = ("prefill", "decode")
MISSED = re.compile(r"none of \d+ probes came to it")
SMALL = [
    *("--dtype=float32", "--num-gpu-blocks-override=192", "--cpu-threads=1"),
    *("--peak-tflops=0.05", "--peak-bandwidth=10"),
]
QUICK = [*SMALL, "--cpu-kernels=torch"]  # to compile kernels takes half a minute of CPU
SINGLE = {role: {"replicas": 1, "args": QUICK} for role in ROLES}
VALUES: dict[str, Any] = {
    "model": {"path": "/models/llama-gqa", "volume": {"hostPath": {"path": str(MODELS)}}},
    "drainTimeout": 20,
    "prefill": {"replicas": 2, "args": QUICK},
    "decode": {"replicas": 2, "args": SMALL},
}


@pytest.fixture
def network() -> Iterator[Network]:
    if why := hosts.unavailable():
        pytest.skip(why)
    with hosts.network() as network:
        yield network


@contextmanager
def release(network: Network, folder: Path, values: Any, **secrets: Any) -> Iterator[Kubelet]:
    """`secrets`: those that the user has made, with their entries."""
    (file := folder / "values.yaml").write_text(json.dumps(values))
    with closing(Kubelet(network, folder, render(file), secrets)) as kubelet:
        serving = [pod for pod in kubelet.pods if pod.component != "test"]
        for pod in serving:
            kubelet.start(pod)
        for pod in serving:
            kubelet.wait(pod, "startup", START_TIMEOUT)
        for pod in serving:
            kubelet.wait(pod, "readiness", START_TIMEOUT)
            assert kubelet.probe(pod, "liveness") == 200
        yield kubelet


def helm_test(kubelet: Kubelet, used: bool = False) -> dict[str, str]:
    """Returns what the doctor found, by subject; it must be content. In a cluster that was `used`,
    nodes have measured themselves, and one that was slow on a busy host may get no probe."""
    (pod,) = named(kubelet, "test")
    pod.log.write_text("")
    kubelet.start(pod)
    code = kubelet.ended(pod, START_TIMEOUT)
    assert code == 0, pod.log.read_text()
    found = json.loads(pod.log.read_text())
    warned = [each for each in found if each["verdict"] != "ok"]
    assert all(used and MISSED.fullmatch(each["seen"]) for each in warned), found
    return {each["subject"]: each["seen"] for each in found}


def named(kubelet: Kubelet, component: str) -> list[Pod]:
    return [pod for pod in kubelet.pods if pod.component == component]


def test_the_pods_serve_and_pass_helm_s_test(network: Network, tmp_path: Path) -> None:
    with release(network, tmp_path, VALUES) as kubelet:
        found = helm_test(kubelet)
        assert found["roles"] == "2 prefill, 2 decode"
        pairs = [seen for subject, seen in found.items() if " → " in subject]
        assert pairs and all("bytes of KV by tcp" in seen for seen in pairs)

        calls = kubelet.calls()
        assert ("prefill", "router", 8002) in calls and ("router", "decode", 9001) in calls
        assert any(source == "prefill" and port > 9001 for source, _, port in calls), "KV"
        assert [call for call in sorted(calls) if not allowed("", *call)] == []
        for pod in kubelet.pods:
            known = {port["containerPort"] for port in pod.container.get("ports", ())}
            assert all(32768 <= port <= 60999 for port in kubelet.listening(pod) - known)

        for pod in kubelet.pods:
            assert "WARN" not in pod.log.read_text(), "all is as it should be: cores, kernels, keys"

        # A node of each role and a router go, as in an upgrade; the others pass the test.
        gone = [named(kubelet, component)[-1] for component in ("prefill", "decode", "router")]
        assert kubelet.stop(*gone) == [0, 0, 0]
        assert helm_test(kubelet)["roles"] == "1 prefill, 1 decode"
        rest = [pod for pod in kubelet.pods if pod.process is not None]
        assert kubelet.stop(*rest) == [0] * len(rest)


def test_an_upgrade_loses_no_request(network: Network, tmp_path: Path) -> None:
    """All pods are replaced, as Kubernetes would, while clients ask: a node of each role at a time,
    and routers, which nodes find by the name of their Service."""
    values = {**VALUES, **{role: {"replicas": 2, "args": QUICK} for role in ROLES}}
    with release(network, tmp_path, values) as kubelet:
        with clients(kubelet) as answers:
            for pair in zip(*(reversed(named(kubelet, role)) for role in ROLES), strict=True):
                kubelet.restart(*pair)
            for router in named(kubelet, "router"):
                kubelet.replace(router)
        assert helm_test(kubelet, used=True)["roles"] == "2 prefill, 2 decode"
    assert len(answers) > 20 and set(answers) == {answers[0]} and answers[0].startswith("200 "), (
        Counter(answers)
    )


@contextmanager
def clients(kubelet: Kubelet) -> Iterator[list[str]]:
    """Three, who ask the same again and again, each time at a router of the Service that is ready;
    status and text of all answers."""
    answers, done = list[str](), threading.Event()

    def ask(draw: random.Random) -> None:
        while not done.is_set():
            ready = [pod for pod in named(kubelet, "router") if pod.serves]
            url = f"http://{draw.choice(ready).address}:8000/v1/completions"
            body = {"prompt": list(range(5, 75)), "max_tokens": 24, "temperature": 0}
            headers = {"Authorization": f"Bearer {kubelet.key('api-key')}"}
            try:
                answer = requests.post(url, json=body, headers=headers, timeout=60)
                said = answer.json()
                text = said["choices"][0]["text"] if answer.ok else said
                answers.append(f"{answer.status_code} {text}")
            except requests.RequestException as error:
                answers.append(str(error))

    threads = [threading.Thread(target=ask, args=(random.Random(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_with_tls_names_take_the_place_of_addresses(network: Network, tmp_path: Path) -> None:
    wildcards = [
        f"*.llm-pdserve-{role}.default.svc.cluster.local" for role in ("prefill", "decode")
    ]
    certs.write(tmp_path / "made", ["llm-pdserve", "llm-pdserve-routers", *wildcards])
    files = {"tls.crt": "cert.pem", "tls.key": "key.pem", "ca.crt": "ca.pem"}
    pair = {entry: (tmp_path / "made" / name).read_text() for entry, name in files.items()}
    tls = {"roles": "roles", "clients": "https"}
    values = {**VALUES, **SINGLE, "router": {"replicas": 1}, "tls": tls}
    with release(network, tmp_path, values, roles=pair, https=pair) as kubelet:
        assert helm_test(kubelet)["roles"] == "1 prefill, 1 decode"
        for role in ROLES:
            (pod,) = named(kubelet, role)
            assert f"{pod.name}.llm-pdserve-{role}.default.svc.cluster.local:9001" in (
                pod.log.read_text()
            )


def test_nodes_of_both_roles_serve_a_model_of_the_hub(network: Network, tmp_path: Path) -> None:
    """All pods share a claim, into which the model comes once, with the token."""
    with running_hub({"gated/llama": MODELS / "llama-gqa"}, hosts.ROUTER) as hub:
        claim = {"persistentVolumeClaim": {"claimName": "hub"}}
        values = {
            "model": {"path": "gated/llama", "volume": claim, "hubTokenSecret": "hub"},
            "env": [{"name": "HF_ENDPOINT", "value": hub.url}],
            **{role: {"replicas": 0} for role in ROLES},
            "both": {"replicas": 2, "args": QUICK},
        }
        with release(network, tmp_path, values, hub={"token": TOKEN}) as kubelet:
            assert helm_test(kubelet)["roles"] == "2 both: no node computes prompts alone"
        assert hub.downloads.count("model.safetensors") == 1


def test_a_trial_serves_the_embedded_model(network: Network, tmp_path: Path) -> None:
    try:
        find_gguf()
    except ConfigError as error:
        pytest.skip(error.message)
    with release(network, tmp_path, {"router": {"replicas": 1}}) as kubelet:
        assert helm_test(kubelet)["roles"] == "1 prefill, 1 decode"
