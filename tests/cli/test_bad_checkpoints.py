"""A node refuses a checkpoint that it cannot serve: one sentence and exit status 2, before it
serves anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paths import MODELS
from thinned import slow
from warm import run_roles, shared

FILE = "model.safetensors"
NORM = "model.norm.weight"


def truncated(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1000])


def another_shape(folder: Path) -> None:
    save_file({**load_file(folder / FILE), NORM: torch.ones(7)}, folder / FILE)


def missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors[NORM]
    save_file(tensors, folder / FILE)


def quantized_as(settings: dict[str, str]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        text = json.dumps({**config, "quantization_config": settings})
        (folder / "config.json").write_text(text)

    return edit


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def many_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**6}))


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": ("decode_node", truncated, FILE),
    "shape": ("decode_node", another_shape, NORM),
    "missing": ("prefill_node", missing_tensor, f"missing: {NORM}"),
    "unknown": ("decode_node", quantized_as({"quant_method": "quark"}), "quant_method 'quark'"),
    "bitsandbytes": (
        "prefill_node",
        quantized_as({"quant_method": "bitsandbytes"}),
        "bitsandbytes weights are not supported",
    ),
    "layers": ("decode_node", many_layers, "no more than 1024"),
    "tokenizer": ("router", without_tokenizer, "tokenizer.json"),
}


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, "native") for name in CASES if name != "layers"),
        *(slow(name, "transformers") for name in CASES),
    ],
)
def test_a_checkpoint_that_cannot_be_served(name: str, impl: str, tmp_path: Path) -> None:
    role, spoil, said = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "llama-gqa", folder)
    spoil(folder)
    shared().load("pdserve.common.model.hf.model")  # some would import it, each by itself
    ports = ["--port=0", "--registry-port=0"] if role == "router" else ["--device=cpu"]
    given = [f"--model={folder}", f"--model-impl={impl}", "--grpc-port=0", *ports]
    ((code, log),) = run_roles(tmp_path, [[role, *given]])
    assert code == 2, log
    assert said in log.strip().splitlines()[-1]
    assert "Traceback" not in log
