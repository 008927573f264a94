"""Compares the fused kernels of a GPU with torch's operators, on Qwen3 8B's shapes in bfloat16:

    python -m benchmarks.fused_kernels

Prints a line of JSON: per kernel and number of tokens the microseconds of a call, the host's part
included, with each of the two, and the largest difference of their results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch, AttentionShape, SlotMapping
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.kernels.gpu.ops import TritonKernels
from pdserve.common.model.kernels.ops import Kernels, TorchKernels
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.sharding import Sharding

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4096, 12288, 32, 8, 128, 16
TOKENS = (1, 32, 2048)
CALLS = 50

Call = Callable[[], tuple[Tensor, ...]]


class Unattended(TorchAttention):
    """Does what comes before attention, and returns the queries."""

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, context: SlotMapping
    ) -> Tensor:
        context.write(kv_cache[layer], k, v)
        return q


def calls(kernels: Kernels, tokens: int) -> Iterator[tuple[str, Call]]:
    random = torch.Generator(CUDA).manual_seed(0)

    def some(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=CUDA).to(DTYPE)

    x, residual, weight = some(tokens, HIDDEN), some(tokens, HIDDEN), some(HIDDEN)
    gate_up, qkv = some(tokens, 2 * INNER), some(tokens, HEADS + 2 * KV_HEADS, DIM)
    angle = torch.rand(tokens, 1, DIM // 2, generator=random, device=CUDA)
    angles = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    sharding = Sharding(GroupCoordinator(device=CUDA), CUDA, DTYPE, kernels=kernels)
    norms = (RMSNorm("q", DIM, 1e-6, sharding), RMSNorm("k", DIM, 1e-6, sharding))
    for norm in norms:
        norm.weight += some(DIM)
    # Sequences of one token, in the middle of a block, or one prompt.
    lens = [1] * tokens if tokens <= 32 else [tokens]
    blocks = tokens if tokens <= 32 else tokens // BLOCK_SIZE
    tables = [[i] for i in range(tokens)] if tokens <= 32 else [range(blocks)]
    starts = [5 if tokens <= 32 else 0] * len(lens)
    slots = SlotMapping.of(AttentionBatch(lens, starts, tables, BLOCK_SIZE), CUDA)
    cache = torch.zeros(1, 2, blocks, KV_HEADS, BLOCK_SIZE, DIM, dtype=DTYPE, device=CUDA)
    plain = Unattended(AttentionShape(HEADS, KV_HEADS, DIM), CUDA, DTYPE)

    def before_attention() -> tuple[Tensor, ...]:
        if kernels.attention_input is None:
            return plain.attend(0, qkv, norms, angles, cache, slots), cache
        return kernels.attention_input(qkv, norms, angles, cache[0], slots), cache

    yield "add_rms_norm", lambda: kernels.add_rms_norm(residual, x, weight, 1e-6)
    yield "silu_and_mul", lambda: (kernels.silu_and_mul(gate_up),)
    yield "before_attention", before_attention


def seconds_of(call: Call) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / CALLS


@torch.inference_mode()
def compared() -> Iterator[dict[str, object]]:
    for tokens in TOKENS:
        pairs = zip(calls(TorchKernels(), tokens), calls(TritonKernels(), tokens), strict=True)
        for (name, plain), (_, fused) in pairs:
            errors = [
                float((one.float() - other.float()).abs().max())
                for one, other in zip(plain(), fused(), strict=True)
            ]
            yield {
                "kernel": name,
                "tokens": tokens,
                "torch_us": 1e6 * seconds_of(plain),
                "triton_us": 1e6 * seconds_of(fused),
                "error": max(errors),
            }


if __name__ == "__main__":
    json.dump(list(compared()), sys.stdout)
    print()
