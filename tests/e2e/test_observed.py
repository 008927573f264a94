"""What a cluster shows of itself: metrics, and where the time of each request went."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import requests

from pdserve.common.obs.exposition import NODE_NAMES, ROUTER_NAMES
from warm import WarmCluster

MODEL = "llama-gqa"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, prefill=2, decode=2) as cluster:
        yield cluster
        cluster.wait_idle()


def pages(cluster: WarmCluster) -> dict[str, str]:
    """What every process shows, by role."""
    addresses = {node["role"]: f"http://{node['metrics_address']}" for node in cluster.nodes()}
    return {
        role: requests.get(f"{url}/metrics", timeout=10).text
        for role, url in ({"router": cluster.url} | addresses).items()
    }


# ---- metrics --------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
def test_promtool_finds_no_fault(cluster: WarmCluster) -> None:
    for role, page in pages(cluster).items():
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, text=True, capture_output=True, timeout=30
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), role


def test_vllm_s_names_are_there_once(cluster: WarmCluster) -> None:
    names = {
        role: {
            name.removesuffix("_total") for name in re.findall(r"^# TYPE pdserve_(\w+)", page, re.M)
        }
        for role, page in pages(cluster).items()
    }
    assert ROUTER_NAMES.keys() <= names["router"]
    for role in ("prefill", "decode"):
        assert NODE_NAMES.keys() <= names[role]


def test_refused_requests_are_counted(cluster: WarmCluster) -> None:
    def count(code: str) -> float:
        page = requests.get(f"{cluster.url}/metrics", timeout=10).text
        found = re.search(rf'^pdserve_requests_total{{code="{code}",.*}} (\S+)', page, re.M)
        return float(found[1]) if found else 0.0

    url = f"{cluster.url}/v1/completions"
    for code, status, body, headers in (
        ("INVALID_REQUEST", 400, '{"prompt": "a", "temperature": -1}', {}),
        ("MODEL_NOT_FOUND", 404, '{"prompt": "a", "model": "other"}', {}),
        ("UNSUPPORTED_MEDIA_TYPE", 415, "a", {"Content-Type": "text/plain"}),
    ):
        before = count(code)
        assert requests.post(url, data=body, headers=headers, timeout=30).status_code == status
        assert count(code) == before + 1
