"""How many KV blocks a rank gets, and the shared memory of a CPU cache."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from pdserve.common.config.node import CacheConfig, EngineConfig, SchedulerConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.engine.messages import CacheShape
from pdserve.common.planning.kv_budget import check_num_blocks, parse_bytes, plan_num_blocks
from pdserve.common.worker.kv_cache import KVCache, cache_bytes

SHAPE = CacheShape(
    layer_start=0, layer_end=3, head_start=2, head_end=4, num_blocks=5, block_size=8, head_dim=16,
    dtype="bfloat16",
)  # fmt: skip


CPU = torch.device("cpu")


def engine(**cache: object) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return EngineConfig(cache=CacheConfig(block_size=16, **cache), scheduler=scheduler)  # type: ignore[arg-type]


def test_parse_bytes() -> None:
    assert [parse_bytes(text) for text in ("4096", "2GiB", "1.5 gib")] == [4096, 2**31, 3 * 2**29]
    assert [parse_bytes(text) for text in ("512MB", "10k")] == [512 * 10**6, 10_000]
    assert parse_bytes(" 64 KiB ") == 65536
    for text in ("", "GiB", "-1GiB", "2 TiB of it", "1e9", "two"):
        with pytest.raises(ConfigError, match="--kv-cache-memory"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("cache", "device", "available", "blocks"),
    [
        ({"num_gpu_blocks_override": 7, "kv_cache_memory": "1GiB"}, "cpu", 0, 7),
        ({"kv_cache_memory": "1023KiB"}, "cpu", 0, 1023),  # given memory is used whole
        ({}, "cpu", 2**40, 28),  # no more than 4 sequences of 100 tokens can use
        ({}, "cpu", 10 * 1024, 10),
        ({}, "cuda", 2**20, 1024),
        ({}, "cuda", -5, 0),
    ],
)
def test_so_many_blocks_of_a_kib(
    cache: dict[str, object], device: str, available: int, blocks: int
) -> None:
    found = plan_num_blocks(engine(**cache), 1024, 100, available_bytes=available, device=device)
    assert found == blocks


@pytest.mark.parametrize(
    ("cache", "flag"),
    [
        ({"num_gpu_blocks_override": 6}, "--num-gpu-blocks-override to 7"),
        ({"kv_cache_memory": "6KiB"}, "--kv-cache-memory"),
        ({}, "--gpu-memory-utilization"),
    ],
)
def test_one_sequence_must_fit(cache: dict[str, object], flag: str) -> None:
    check_num_blocks(engine(**cache), 7, max_model_len=100)
    with pytest.raises(ConfigError, match=flag):
        check_num_blocks(engine(**cache), 6, max_model_len=100)


def test_cpu_cache_is_shared_through_its_descriptor() -> None:
    cache = KVCache.allocate(SHAPE, CPU)
    assert cache.fd is not None
    size = os.fstat(cache.fd).st_size
    assert size == cache_bytes(SHAPE) == cache.tensor.nbytes
    with mmap.mmap(cache.fd, size) as other:
        cache.tensor.view(torch.uint8).view(-1)[-1] = 42
        assert other[size - 1] == 42
        other[0] = 7
        assert int(cache.tensor.view(torch.uint8).view(-1)[0]) == 7
    cache.close()


def test_nobody_can_resize_the_shared_memory() -> None:
    cache = KVCache.allocate(SHAPE, CPU)
    assert cache.fd is not None
    for size in (0, cache_bytes(SHAPE) + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(cache.fd, size)
    cache.close()
