"""`vllm bench serve`, where vLLM is installed: PATH or `VLLM` names the program."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from conftest import MODELS, Server, run

VLLM = shutil.which(os.environ.get("VLLM", "vllm"))


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed: VLLM=/path/to/vllm names it")
def test_a_benchmark(server: Server, tmp_path: Path) -> None:
    assert VLLM is not None
    command = [
        *(VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--model", server.model, "--tokenizer", str(MODELS / server.model)),
        *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "8"),
        *("--num-prompts", "6", "--save-result", "--result-filename", "result.json"),
    ]
    run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 48)
