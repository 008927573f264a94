"""Whole models on the Triton kernels, in the interpreter: prompts, decodes, and decodes padded as a
CUDA graph's, beside the same on torch's operators. FlashInfer is a fake."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest
import torch

import fake_flashinfer
from interpreted import DEVICE
from paths import MODELS
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.kernels.gpu.ops import TritonKernels
from pdserve.common.worker.graphs import Compute, DecodeGraphs
from tiny_engine import BLOCK_SIZE, CPU, NUM_BLOCKS, load, new_cache, some_tokens, step

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the model is on a CPU"),
]

FLASHINFER = "pdserve.common.model.attention_flashinfer"
TABLES = [[9, 3], [7, 12]]
LENGTHS = [15, 18]


def again(compute: Compute) -> Callable[[], object]:
    """Stands for a capture: replays by computing again over the same memory."""
    compute()
    return compute


@pytest.mark.parametrize("name", ["qwen3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_steps_on_triton_s_kernels_are_those_on_torch_s(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, FLASHINFER, raising=False)
    module = importlib.import_module(FLASHINFER)
    monkeypatch.delitem(sys.modules, FLASHINFER)
    plain, fused = load(MODELS / name), load(MODELS / name, kernels=TritonKernels())
    fused.attentions = [
        module.FlashInferAttention(each.shape, CPU, torch.float32, fused.kernels.attention_input)
        for each in plain.attentions
    ]
    caches = new_cache(plain), new_cache(fused)
    for (each,) in caches:
        each.normal_(generator=torch.Generator().manual_seed(0))  # of the blocks' last owners
    prompts = [[*some_tokens(length, seed=length)] for length in LENGTHS]
    sequences = [(prompt, 0, table) for prompt, table in zip(prompts, TABLES, strict=True)]
    found, expected = step(fused, caches[1], sequences), step(plain, caches[0], sequences)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    graphs = DecodeGraphs(fused, caches[1], (3,), [2], again)
    for added in range(2):  # the second begins a block
        starts = [length + added for length in LENGTHS]
        decodes = [([5], *each) for each in zip(starts, TABLES, strict=True)]
        expected = step(plain, caches[0], decodes)
        batch = AttentionBatch([1, 1], starts, TABLES, BLOCK_SIZE)
        torch.testing.assert_close(
            graphs.run([5, 5], starts, [batch], None), expected, rtol=1e-4, atol=1e-4
        )
    used = slice(0, NUM_BLOCKS - 1)  # the last is the padding's
    torch.testing.assert_close(caches[1][0][:, :, used], caches[0][0][:, :, used])
