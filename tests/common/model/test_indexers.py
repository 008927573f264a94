"""Sparse attention with an indexer, over the cache: chunks and ranks choose the tokens that
transformers' classes choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.model.hf.class_config import read_config
from pdserve.common.model.hf.layout import choose_layout
from pdserve.common.model.hf.pipeline import check_stage
from pdserve.common.model.implementation import read_spec
from pdserve.common.model.stages import Stage
from sweep import logits
from thinned import slow
from windowed import INDEXED

pytestmark = pytest.mark.usefixtures("inference")

TOKENS = torch.arange(3, 79)
DEEPSEEK = INDEXED["deepseek-v3.2"].to_dict()
SHARED = {"indexer_types": ["full", "shared", "full"]}  # the second layer takes the first one's


def made(config: Any, folder: Path) -> tuple[Path, Any]:
    """Returns the folder, and what transformers says of TOKENS."""
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
    return folder, model(TOKENS[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    "config",
    [GlmMoeDsaConfig(**{**DEEPSEEK, **SHARED}), slow(DeepseekV32Config(**DEEPSEEK))],
    ids=["shared", "deepseek"],
)
def test_queries_attend_to_what_transformers_chooses(config: Any, tmp_path: Path) -> None:
    folder, right = made(config, tmp_path / "a")
    spec = read_spec(folder, "auto", {})
    for split in ({}, {"tp": 2}):
        found = logits(folder, spec, TOKENS, **split)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "index_topk": 4096}))
    every = logits(folder, spec, TOKENS)
    torch.testing.assert_close(every[:24], right[:24], rtol=1e-3, atol=1e-3)  # few enough for all
    assert (every[24:] - right[24:]).abs().amax(-1).min() > 1e-2


def test_keys_have_a_group_of_their_own(tmp_path: Path) -> None:
    """A stage has both of a layer's, and the indexer that its first layer shares."""
    named = {"architectures": ["GlmMoeDsaForCausalLM"]}
    config = GlmMoeDsaConfig(**{**DEEPSEEK, **SHARED, **named})
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path, "auto", {})
    keys, attention = LayerKV(1, 16, planes=1), LayerKV(1, 40, planes=1)  # latents
    assert spec.layer_kv == (keys, attention, 0, attention, keys, attention)
    with pytest.raises(ConfigError, match="each layer counts as 2"):
        choose_layout(spec, read_config(tmp_path, {}), 1, Stage(0, 3, last=False))
    with pytest.raises(ConfigError, match="layer 2 attends to the KV of layer 0"):
        check_stage(spec.architecture, spec.layer_kv, Stage(2, 6, first=False))
