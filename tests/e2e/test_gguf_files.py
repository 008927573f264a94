"""A GGUF file through real servers: the tokens are those of transformers with the weights that the
file stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import reference
import sentencepiece_vocab
from cluster import MODELS
from gguf_files import write_gguf
from paths import ROOT
from pdserve import LLM, SamplingParams
from pdserve.cli.main import main
from pdserve.common.config.engine import ModelConfig
from pdserve.demo_model.embedded import resolve_model
from warm import WarmCluster, run_roles

PROMPTS = [tuple(range(5, 75)), (7, 300, 41), tuple(range(3, 500, 3))]
NUM_TOKENS = 24


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A path; what roles make of the file is deleted from the cache of all tests, which has their
    compiled kernels."""
    yield (path := tmp_path / "tiny.Q8_0.gguf")
    made = resolve_model(ModelConfig(model=str(path)))
    shutil.rmtree(made.model or "")


def right(dense: Path) -> list[str]:
    assert min(reference.margin(dense, each, NUM_TOKENS) for each in PROMPTS) > 1e-3
    return [reference.decode(dense, reference.greedy(dense, each, NUM_TOKENS)) for each in PROMPTS]


def q8_0(name: str) -> str:
    """With matrices that stay packed, and some that do not."""
    return "Q4_1" if "down_proj" in name else "Q8_0"


def test_a_gguf_file(file: Path, tmp_path: Path) -> None:
    write_gguf(MODELS / "qwen2", file, q8_0, tmp_path / "dense")
    expected = right(tmp_path / "dense")
    with WarmCluster(file, 0, 0) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        asked = [cluster.complete(list(each), **options) for each in PROMPTS]
        assert [each["choices"][0]["text"] for each in asked] == expected
        assert asked[0]["model"] == "tiny.Q8_0"
        said = "the weights are stored as GGUF Q4_1, Q8_0 and dequantized to float32"
        assert cluster.log().count(said) == 2
        cluster.wait_idle()


@pytest.mark.slow
def test_stages_and_python(file: Path, tmp_path: Path) -> None:
    """`LLM` starts what `pdserve up` does."""
    write_gguf(MODELS / "mixtral", file, q8_0, tmp_path / "dense")
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    options = {"prefill_pp": 2, "dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 96}
    with LLM(model=str(file), prefill=1, decode=1, **options) as llm:
        prompts = [{"prompt_token_ids": list(each)} for each in PROMPTS]
        said = [each.outputs[0].text for each in llm.generate(prompts, sampling)]
    assert said == right(tmp_path / "dense")


def test_a_sentencepiece_vocabulary_has_llama_cpp_s_ids(file: Path) -> None:
    recorded = json.loads((ROOT / "tests" / "demo_model" / "llama_cpp_ids.json").read_text())
    write_gguf(MODELS / "qwen2", file, q8_0, metadata=sentencepiece_vocab.metadata())
    with WarmCluster(file, 0, 0) as cluster:
        cluster.wait_for(lambda: cluster.get("/health"))
        for text, ids in zip(recorded["texts"], recorded["default"], strict=True):
            assert cluster.post("/tokenize", prompt=text).json()["tokens"] == ids


def test_every_role_refuses_a_file_that_is_cut(tmp_path: Path) -> None:
    file = write_gguf(MODELS / "qwen2", tmp_path / "tiny.gguf", lambda name: "Q8_0")
    file.write_bytes(file.read_bytes()[:-1000])
    flags = [f"--model={file}", "--grpc-port=0"]
    router = ["router", *flags, "--port=0", "--registry-port=0"]
    nodes = [[role, *flags, "--device=cpu"] for role in ("prefill_node", "decode_node")]
    for code, output in run_roles(tmp_path, [router, *nodes]):
        assert code == 2, output
        assert f"{file} is truncated or damaged" in output.strip().splitlines()[-1]
        assert "Traceback" not in output


def test_plan_and_model_take_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(MODELS / "qwen2", file, q8_0)
    assert main(["plan", f"--model={file}", "--gpu-memory=1GiB", "--json"]) == 0
    decode = json.loads(capsys.readouterr().out)["roles"]["decode"]
    assert (decode["quantization"], decode["stored"]) == (
        "int8",
        "GGUF Q4_1, Q8_0, dequantized while loaded",
    )
    assert main(["model", str(file)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / "config.json").is_file()
