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
from warm import WarmCluster, run_roles, shared

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
    return config_with(quantization_config=settings)


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def template_of_number(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=5)


def template_with(text: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", chat_template=text)


def normalized_by(steps: list[object]) -> Callable[[Path], None]:
    normalizer = {"type": "Sequence", "normalizers": steps}
    return lambda folder: edit_json(folder / "tokenizer.json", normalizer=normalizer)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def config_with(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


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
    "template": ("router", template_of_number, "its chat_template is no text"),
    "syntax": (
        "router",
        template_with("{% for each in messages %}\n{{ each.content"),
        "the checkpoint's chat template, line 2: unexpected end of template",
    ),
    "filter": ("router", template_with("{{ messages | shout }}"), "No filter named 'shout'"),
    "tokenizer": ("router", without_tokenizer, "tokenizer.json"),
    "endless template": (
        "router",
        template_with("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3),
        "chat template (--chat-template replaces it), tried on a few messages, takes more than",
    ),
    "charsmap": (
        "router",
        normalized_by([{"type": "Precompiled", "precompiled_charsmap": "AAAA"}]),
        "PanicException: Precompiled",
    ),
    "charsmap of an endless size": (
        "decode_node",
        normalized_by([{"type": "Precompiled", "precompiled_charsmap": "/////w=="}]),
        "or ends its process",
    ),
}


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, "native") for name in CASES),
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


def test_warnings_at_start(tmp_path: Path) -> None:
    """A tokenizer with a token that the model does not have, and a template that fails for a
    plain message: only requests with them are refused."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "llama-gqa", folder)
    template_with("{{ messages.missing.name }}")(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    more = [*tokens, {**tokens[0], "id": 512, "content": "<image>"}]
    edit_json(folder / "tokenizer.json", added_tokens=more)
    with WarmCluster(folder) as cluster:
        for said in (
            "vocabulary of 512 lacks 1 of the tokenizer's tokens, such as '<image>'",
            "chats may fail: the chat template failed: 'list object' has no attribute 'missing'",
        ):
            assert said in cluster.log()
        assert cluster.post("/v1/completions", prompt="Once", max_tokens=1).status_code == 200
        refused = cluster.post("/v1/completions", prompt="an <image>", max_tokens=1)
        assert refused.status_code == 400 and "not in 0…511" in refused.text
        chat = [{"role": "user", "content": "Once"}]
        refused = cluster.post("/v1/chat/completions", messages=chat, max_tokens=1)
        assert refused.status_code == 400 and "template failed" in refused.text


def rope(**settings: object) -> Callable[[Path], None]:
    return config_with(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **settings})


CONFIGS: dict[str, tuple[Callable[[Path], None], str, str]] = {  # what native says, and the other
    "layers": (config_with(num_hidden_layers=10**6), "from 1 to 1024", "more than the supported"),
    "types": (config_with(layer_types=["full_attention"]), "do not fit 4 layers", "layer_types"),
    "window": (config_with(sliding_window=-5), "from 0 to 2147483647", "a window of -5 tokens"),
    "heads": (config_with(num_key_value_heads=3), "do not divide", "[64, 128] ≠ [96, 128]"),
    "epsilon": (config_with(rms_norm_eps=float("nan")), "positive number", "from 0 to 1"),
    "theta": (rope(rope_theta=0), "rope_theta must be a positive", "rope_theta must be a positive"),
    "factor": (rope(factor=-2.0), "factor must be a positive", "factor must be a positive"),
    "rope": (rope(rope_type="wavelet"), "'wavelet' is not supported", "wavelet"),
    "huge": (config_with(hidden_size=10**12), "from 1 to 2147483647", "not enough memory"),
}
"""Wrong values and contradictions. By default both paths would be tried, but a value that is wrong
for a native model is not passed on to a class of transformers, which may accept it."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_contradicts_itself(name: str, tmp_path: Path) -> None:
    spoil, native, other = CONFIGS[name]
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "mistral", folder)
    spoil(folder)
    shared().load("pdserve.common.model.hf.model")
    flags = [f"--model={folder}", "--device=cpu", "--grpc-port=0", "--router=127.0.0.1:9"]
    ended = run_roles(
        tmp_path,
        [["decode_node", *flags, f"--model-impl={impl}"] for impl in ("auto", "transformers")],
    )
    for (code, log), said in zip(ended, (native, other), strict=True):
        assert code == 2, log
        assert said in log.strip().splitlines()[-1]
        assert "Traceback" not in log
