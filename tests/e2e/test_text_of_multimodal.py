"""Multimodal checkpoints as the Hub has them: the text model is served, images are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from paths import MODELS
from thinned import slow
from tiny_engine import some_tokens
from warm import WarmCluster, shared
from windowed import SIZES

TEXT = {**SIZES, "head_dim": 16, "sliding_window": 24}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28}
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "eos_token_id": 0}
QWEN = {**SIZES, "rope_parameters": MROPE, "sliding_window": None}
CONFIGS: dict[str, Any] = {
    "gemma3": Gemma3Config(
        text_config=TEXT,
        vision_config={**TOWER, "num_hidden_layers": 1, "patch_size": 14},
        mm_tokens_per_image=4,
        eos_token_id=0,
    ),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**TOWER, "num_hidden_layers": 1, "patch_size": 14},
        eos_token_id=0,
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=QWEN,
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        **IDS,
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config={**QWEN, "head_dim": 16},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        **IDS,
    ),
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def make(name: str, folder: Path) -> Any:
    """Writes the checkpoint; returns the whole model."""
    torch.manual_seed(1)
    with torch.inference_mode(False), torch.no_grad():
        model = AutoModelForImageTextToText.from_config(CONFIGS[name], dtype=torch.float32)
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "qwen3" / file, folder)
    if name == "qwen2.5-vl":
        make_flat(folder)
    return model.eval()


def make_flat(folder: Path) -> None:
    """Writes the config as Qwen's own checkpoints have it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": MROPE["mrope_section"]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps({**text, **config}))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["qwen2.5-vl", slow("qwen3-vl"), slow("gemma3"), slow("mistral3")])
def test_text_is_answered_and_an_image_refused(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    if name == "gemma3":
        shared().load("transformers.models.gemma3.modeling_gemma3", "pdserve.common.model.hf.model")
    with WarmCluster(tmp_path, max_model_len=1024) as cluster:
        for length in (7, 30, 90):
            prompt = list(some_tokens(length, seed=length))
            answer = cluster.complete(prompt, max_tokens=17, ignore_eos=True, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == greedy(model, prompt, 17)
        content = [{"type": "text", "text": "What is this?"}, IMAGE]
        refused = cluster.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=4
        )
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "messages[0].content"
        assert error["message"].startswith("images are not supported")
