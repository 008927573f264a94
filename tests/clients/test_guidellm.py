"""GuideLLM: a short benchmark, whose answers have the requested number of tokens."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import requests

from conftest import MODELS, Server, apart, run


def finished(server: Server) -> float:
    """Returns how many answers the server has finished, by its metrics."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^pdserve_request_success_total\{.*\} (\S+)$", text, re.M)))


def test_a_benchmark(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        *(apart("guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={server.url},model={server.model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODELS / server.model}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    ]
    before = finished(server)
    run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"] and not benchmark["requests"]["incomplete"]
    found = benchmark["requests"]["successful"]
    # On a busy host GuideLLM may end before it has the last result from its worker process.
    assert finished(server) - before == 6 and len(found) in (5, 6)
    assert all(each["output_metrics"]["text_tokens"] == 8 for each in found)
    # Its prompt and what the chat template adds, as the server counted them.
    assert all(each["input_metrics"]["text_tokens"] >= 24 for each in found)
