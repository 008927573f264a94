"""A forward pass of fake tensors, which have a device and a shape but no memory: what would mix
devices or shapes on a GPU shows without one, where torch is built for CUDA."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paths import MODELS
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model import flashinfer_limits
from pdserve.common.model.attention import AttentionBatch, AttentionShape
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.sharding import Sharding

NO_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
# Mixtures are not among them: on a GPU the number of an expert's rows is a value, which fakes lack.
DENSE = ("llama-gqa", "qwen2", "qwen3", "mistral")
BATCHES = [
    AttentionBatch([1, 1, 1], [15, 30, 0], [[3], [1, 4], [2]], 16),
    AttentionBatch([1, 9, 20], [15, 30, 0], [[3], [1, 4, 7], [2, 6]], 16),
]


def moved(found: Any, target: torch.device) -> Any:
    """The step's context, whose making needs values, on another device."""
    if isinstance(found, torch.Tensor):
        return found.to(target)
    if isinstance(found, tuple):
        return tuple(moved(each, target) for each in found)
    if is_dataclass(found) and not isinstance(found, type):
        parts = {each.name: moved(getattr(found, each.name), target) for each in fields(found)}
        return replace(found, **parts)
    return found


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", BATCHES, ids=["decodes", "mixed"])
def test_a_fake_forward_stays_on_its_device(
    name: str, where: str, batch: AttentionBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_limits, "find_spec", lambda name: None)  # torch's attention
    target = torch.device("cuda", 0) if where == "cuda" else torch.device("cpu")
    spec = ModelSpec.from_folder(MODELS / name)
    heads = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    context = TorchAttention(heads, torch.device("cpu"), torch.bfloat16).prepare(batch)
    total = sum(batch.query_lens)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        model = CausalLM(spec, Sharding(GroupCoordinator(), target, torch.bfloat16))
        shape = spec.num_layers, 2, 20, spec.num_kv_heads, 16, spec.head_dim
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=target)
        ids = torch.zeros(total, dtype=torch.int64, device=target)
        hidden = model.forward(ids, ids, [moved(context, target)], [cache])
        logits = model.compute_logits(hidden)
    assert logits.shape == (total, spec.vocab_size) and logits.device.type == where
