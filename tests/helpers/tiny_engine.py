"""A minimal engine for tests of the model: a model, a cache and one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.kv_groups import KV_AUTO, kv_row
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.device import choose_kernels, dtype_name
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 64


@contextmanager
def single_threaded_inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def load(
    folder: Path,
    group: Any = None,
    kernels: str | Kernels = "torch",
    stage: Stage | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = KV_AUTO,
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    spec = ModelSpec.from_folder(folder)
    chosen = choose_kernels(kernels, CPU) if isinstance(kernels, str) else kernels
    group = group or GroupCoordinator()
    sharding = Sharding(group, CPU, dtype, kernels=chosen, kv_cache_dtype=kv_cache_dtype)
    config = ModelConfig(model=str(folder), quantization=quantization)
    return load_model(spec, config, sharding, stage)


def new_cache(model: CausalLM) -> list[torch.Tensor]:
    """Returns one tensor per KV group."""
    caches = []
    for attention, group in zip(model.attentions, model.spec.kv_groups, strict=True):
        start, end = group.layers_between(model.stage.start, model.stage.end)
        heads, dim = attention.shape.num_kv_heads, attention.shape.head_dim
        numbers, dtype = kv_row(dim, dtype_name(model.dtype), attention.kv_cache_dtype)
        size = (end - start, group.planes, NUM_BLOCKS, heads, BLOCK_SIZE, numbers)
        caches.append(torch.zeros(size, dtype=getattr(torch, dtype)))
    return caches


Sequence = tuple[list[int], int, list[int]]  # tokens, start, block table


def step(model: CausalLM, cache: list[torch.Tensor], sequences: list[Sequence]) -> torch.Tensor:
    """Returns the logits of all tokens. All KV groups use the same block tables."""
    tokens, starts, tables = zip(*sequences, strict=True)
    batch = AttentionBatch([len(part) for part in tokens], starts, tables, BLOCK_SIZE)
    positions = [start + i for part, start, _ in sequences for i in range(len(part))]
    hidden = model.forward(
        torch.tensor([token for part in tokens for token in part]),
        torch.tensor(positions),
        model.prepare([batch] * len(cache)),
        cache,
    )
    return model.compute_logits(hidden)


def greedy(model: CausalLM, prompt: list[int], count: int, table: list[int]) -> list[int]:
    cache = new_cache(model)
    tokens = [int(step(model, cache, [(prompt, 0, table)])[-1].argmax())]
    while len(tokens) < count:
        last = ([tokens[-1]], len(prompt) + len(tokens) - 1, table)
        tokens.append(int(step(model, cache, [last])[0].argmax()))
    return tokens


def some_tokens(count: int, seed: int = 0, vocab: int = 512) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()
