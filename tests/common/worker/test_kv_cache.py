"""How many KV blocks a rank gets, and the shared memory of a CPU cache."""

from __future__ import annotations

import mmap
import operator
import os
from dataclasses import replace

import pytest
import torch

from pdserve.common.config.engine import (
    AUTO,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import KVGroup, LayerKV, grouped
from pdserve.common.engine.messages import CacheShape
from pdserve.common.planning.kv_budget import (
    blocks_per_sequence,
    check_num_blocks,
    fit_context,
    parse_bytes,
    plan_num_blocks,
    split_blocks,
)
from pdserve.common.worker.kv_cache import KVCache, cache_bytes

SHAPE = CacheShape(
    layer_start=0, layer_end=3, head_start=2, head_end=4, num_blocks=5, block_size=8, head_dim=16,
    dtype="bfloat16",
)  # fmt: skip


CPU = torch.device("cpu")
FULL = (KVGroup((0, 1), 1, 8),)
MIXED = (KVGroup((0,), 1, 8), KVGroup((1, 2), 1, 8, window=32))

WITH_STATES = grouped([LayerKV(1, 8), LayerKV.of_state(1, 128)])


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
    found = plan_num_blocks(engine(**cache), FULL, [1024], 100, available, device)
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
    check_num_blocks(engine(**cache), FULL, 7, max_model_len=100)
    with pytest.raises(ConfigError, match=flag):
        check_num_blocks(engine(**cache), FULL, 6, max_model_len=100)


def test_a_window_takes_what_it_can_use_and_full_attention_the_rest() -> None:
    """Four sequences hold 100 tokens in 7 blocks, and of a window of 32 with chunks of 16 five."""
    small = replace(engine(), scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    assert split_blocks(small, MIXED, 10, 100) == (10, 10)
    assert split_blocks(small, MIXED, 30, 100) == (30, 20)

    def blocks(available: int, device: str = "cuda") -> int:
        return plan_num_blocks(small, MIXED, [1024, 2048], 100, available, device)

    assert blocks(3 * 1024 * 10) == 10
    assert blocks(1024 * (25 + 2 * 20)) == 25
    assert blocks(1024 * (25 + 2 * 20) - 1) == 24
    assert blocks(2**40, "cpu") == 28
    # A stage of a pipeline may have layers of one group alone.
    assert plan_num_blocks(small, MIXED, [0, 2048], 100, 2048 * 20, "cuda") == 28
    assert plan_num_blocks(small, MIXED, [0, 2048], 100, 2048 * 9, "cuda") == 9
    # If all layers have windows, the longest ones take all.
    windows = (KVGroup((0,), 1, 8, window=32),)
    assert plan_num_blocks(small, windows, [1024], 100, 1024 * 99, "cuda") == 99
    check_num_blocks(small, windows, 5, max_model_len=10**6)
    with pytest.raises(ConfigError, match="needs 5"):
        check_num_blocks(small, windows, 4, max_model_len=10**6)


def test_states_are_for_as_many_sequences_as_the_tokens() -> None:
    """Four blocks a sequence, of 1024 tokens at most; four sequences at most."""
    assert split_blocks(engine(), WITH_STATES, 10, 100) == (10, 8)
    assert split_blocks(engine(), WITH_STATES, 28, 100) == (28, 16)
    assert split_blocks(engine(), WITH_STATES, 128, 4096) == (128, 8)
    assert split_blocks(engine(), WITH_STATES, 2, 20) == (2, 2), "one sequence of two blocks"

    def blocks(available: int) -> int:
        return plan_num_blocks(engine(), WITH_STATES, [1024, 8192], 4096, available, "cuda")

    assert blocks(1024 * (128 + 8 * 8)) == 128
    assert blocks(1024 * (128 + 8 * 8) + 1024) == 128, "one block more is of a third sequence"


def test_auto_is_the_longest_sequence_that_fits() -> None:
    auto = replace(
        engine(),
        model=ModelConfig(max_model_len=AUTO),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    )
    assert [fit_context(auto, FULL, blocks, 100) for blocks in (1, 6, 7, 99)] == [16, 96, 100, 100]
    for blocks in range(1, 9):
        longest = fit_context(auto, MIXED, blocks, 1000)
        held = blocks_per_sequence(auto, MIXED, longest)
        assert all(map(operator.le, held, split_blocks(auto, MIXED, blocks, 1000)))
        assert blocks_per_sequence(auto, MIXED, longest + 1)[0] > blocks
    windows = (KVGroup((0,), 1, 8, window=32),)
    assert fit_context(auto, windows, 5, 10**6) == 10**6
    assert fit_context(auto, windows, 4, 10**6) == 64
    with pytest.raises(ConfigError, match="has 0 blocks"):
        fit_context(auto, FULL, 0, 100)
    assert fit_context(engine(), FULL, 99, 100) == 100
    with pytest.raises(ConfigError, match="needs 7"):
        fit_context(engine(), FULL, 6, 100)


def test_cpu_caches_are_shared_through_one_descriptor() -> None:
    other_shape = replace(SHAPE, layer_end=1, num_blocks=3)
    cache = KVCache.allocate([SHAPE, other_shape], CPU)
    assert cache.fd is not None
    size = os.fstat(cache.fd).st_size
    first, second = cache.groups
    assert [first.offset, second.offset] == [0, cache_bytes(SHAPE)]
    assert size == cache_bytes(SHAPE) + cache_bytes(other_shape)
    assert (first.tensor.nbytes, second.tensor.nbytes) == (second.offset, size - second.offset)
    with mmap.mmap(cache.fd, size) as other:
        second.tensor.view(torch.uint8).view(-1)[-1] = 42
        assert other[size - 1] == 42
        other[0], other[second.offset] = 7, 8
        assert [int(each.tensor.view(torch.uint8).view(-1)[0]) for each in cache.groups] == [7, 8]
    cache.close()


def test_the_shared_memory_cannot_be_resized() -> None:
    cache = KVCache.allocate([SHAPE], CPU)
    assert cache.fd is not None
    for size in (0, cache_bytes(SHAPE) + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(cache.fd, size)
    cache.close()
