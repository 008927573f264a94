"""A forward pass of fake tensors on `cuda`, which have a device and a shape but no memory and no
values. Where torch is built for CUDA it shows without a GPU or a driver what would mix devices or
shapes there, and where the host would wait for a value: fake tensors raise."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import check_launch
from paths import MODELS
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model import expert_weights, flashinfer_limits
from pdserve.common.model.attention import AttentionBatch, AttentionShape
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.kernels.gpu import launch
from pdserve.common.model.sharding import Sharding

NO_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DENSE = ("llama-gqa", "qwen2", "qwen3", "mistral")
# A GPU computes all experts by one product, without the number of rows of each; here fakes on a CPU
# do, too.
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")
CASES = [
    *((name, CPU) for name in (*DENSE, *MIXTURES)),
    *(pytest.param(name, CUDA, marks=NO_CUDA) for name in (*DENSE, *MIXTURES)),
]
BATCHES = [
    AttentionBatch([1, 1, 1], [15, 30, 0], [[3], [1, 4], [2]], 16),
    AttentionBatch([1, 9, 20], [15, 30, 0], [[3], [1, 4, 7], [2, 6]], 16),
]


def moved(found: Any, mode: FakeTensorMode, target: torch.device) -> Any:
    """The step's context, whose making needs values, as fakes on another device."""
    if isinstance(found, torch.Tensor):
        return mode.from_tensor(found).to(target)
    if isinstance(found, tuple):
        return tuple(moved(each, mode, target) for each in found)
    if is_dataclass(found) and not isinstance(found, type):
        parts = {
            each.name: moved(getattr(found, each.name), mode, target) for each in fields(found)
        }
        return replace(found, **parts)
    return found


@pytest.mark.parametrize(("name", "target"), CASES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=["decodes", "mixed"])
def test_a_fake_forward_stays_on_its_device(
    name: str, target: torch.device, batch: AttentionBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_limits, "find_spec", lambda name: None)  # torch's attention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_run", check_launch)
    monkeypatch.setattr(expert_weights, "_has_kernel", lambda weight: True)
    spec = ModelSpec.from_folder(MODELS / name)
    heads = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    context = TorchAttention(heads, CPU, torch.bfloat16).prepare(batch)
    total = sum(batch.query_lens)
    with FakeTensorMode() as mode, torch.inference_mode():
        group = GroupCoordinator(device=target)
        model = CausalLM(spec, Sharding(group, target, torch.bfloat16))
        shape = spec.num_layers, 2, 20, spec.num_kv_heads, 16, spec.head_dim
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=target)
        ids = torch.zeros(total, dtype=torch.int64, device=target)
        hidden = model.forward(ids, ids, [moved(context, mode, target)], [cache])
        logits = model.compute_logits(hidden)
    assert logits.shape == (total, spec.vocab_size) and logits.device == target
