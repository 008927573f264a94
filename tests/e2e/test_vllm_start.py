"""A command line, a file and variables that were made for vLLM start a cluster here; all its
processes write JSON if asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import requests

from cluster import Cluster
from paths import MODELS
from waiting import wait_until

KEY = "sk-from-vllm"
FILE = """
served_model_name: [first, second]
enable_chunked_prefill: true
disable_log_requests: true
"""


def test_vllm_s_file_flags_and_key_start_a_closed_server_whose_log_is_json(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(FILE)
    environment = {"VLLM_API_KEY": KEY, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_V1": "1"}
    options = {"config": str(file), "both": 1, "swap_space": 4, "trust_remote_code": ""}
    options |= {"log_format": "json"}
    with Cluster("llama-gqa", environment, **options) as cluster:
        assert cluster.get("/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        models = requests.get(f"{cluster.url}/v1/models", headers=headers, timeout=10).json()
        assert [model["id"] for model in models["data"]][:2] == ["first", "second"]
        body = {"model": "second", "prompt": "a", "max_tokens": 2}
        url = f"{cluster.url}/v1/completions"
        answer = requests.post(url, json=body, headers=headers, timeout=60).json()
        assert answer["usage"]["completion_tokens"] > 0
        log = cluster.log()
        for name in ("--enable-chunked-prefill", "--disable-log-requests", "--swap-space",
                     "--trust-remote-code", "VLLM_API_KEY is taken as --api-key",
                     "VLLM_LOGGING_LEVEL is taken as --log-level", "VLLM_USE_V1"):  # fmt: skip
            assert log.count(name) == 1, log
        assert KEY not in log
        up = psutil.Process(cluster.processes["up"].pid)
        assert all(KEY not in " ".join(each.cmdline()) for each in up.children(recursive=True))
        wait_until(lambda: "cluster ready" in cluster.log())
        cluster.stop()
        found = [json.loads(line) for line in cluster.log().splitlines()]
        assert {each["process"] for each in found} == {"up", "router", "both-0"}
        own = [each for each in found if each["process"] == "up"]
        assert any("cluster ready" in each["message"] for each in own)
        assert {each["level"] for each in own} == {"info"}


def test_a_flag_that_cannot_be_left_out_ends_the_start_before_anything_runs() -> None:
    pdserve = Path(sys.executable).with_name("pdserve")
    ended = subprocess.run(
        [str(pdserve), "serve", str(MODELS / "llama-gqa"), "--ssl-ca-certs", "/ca.pem"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "pdserve serve: error: vLLM's --ssl-ca-certs is not available here: "
    )
    assert ended.stderr.count("\n") == 1
