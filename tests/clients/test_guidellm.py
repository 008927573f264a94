"""GuideLLM: a short benchmark, with as many tokens as it asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import MODELS, Server, apart, run


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
    run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    found = benchmark["requests"]["successful"]
    assert [each["output_metrics"]["text_tokens"] for each in found] == [8] * 6
    # Its prompt and what the chat template adds, as the server counted them.
    assert all(each["input_metrics"]["text_tokens"] >= 24 for each in found)
