"""Computes how many KV blocks a rank gets. Nodes use measured sizes, `pdserve plan` estimates."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from operator import mul

from pdserve.common.config.engine import AUTO, EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import STATES_HELD, KVGroup

USUAL_TOKENS = 1024
"""Assumed tokens per sequence when counting state blocks. With shorter sequences state blocks run
out first, with longer ones token blocks."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str, flag: str = "--kv-cache-memory") -> int:
    """Parses a size such as "2GiB", "512 MB" or "4096" into bytes.

    Raises:
        ConfigError: `text` is not a size; the message names `flag`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{flag} {text!r} is not a size such as 2GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_bytes(count: int) -> str:
    """Formats a size: "27.51 GiB", "1.5 MiB" or "96 KiB"."""
    if abs(count) >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    if abs(count) >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.4g} KiB"


def gpu_cache_bytes(total: int, utilization: float, others: int, peak: int) -> int:
    """Returns the bytes left for KV on a GPU of `total` bytes, negative if the model does not fit.

    `others`: this process's memory outside torch (CUDA context, communicators). `peak`: most bytes
    torch holds (weights and the largest step's activations). Memory of other processes does not
    count against this node's share.
    """
    return int(total * utilization) - others - peak


def plan_num_blocks(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    block_bytes: Sequence[int],
    max_model_len: int,
    available_bytes: int,
    device: str,
) -> int:
    """Returns a rank's number of KV blocks of the first group: by --num-gpu-blocks-override or
    --kv-cache-memory, else what fits into `available_bytes`; `split_blocks` gives those of the
    others. On a CPU, whose memory other programs need too, at most what the scheduler can use at
    once. `block_bytes`: of a block in each group."""
    cache, usable = config.cache, most_blocks(config, groups, max_model_len)
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory is not None:
        available_bytes = parse_bytes(cache.kv_cache_memory)
    available_bytes = max(0, available_bytes)

    def nbytes(first: int) -> int:
        return sum(map(mul, split_blocks(config, groups, first, max_model_len), block_bytes))

    # A stage without a layer of the first group needs no more of its blocks than are used.
    most = available_bytes // block_bytes[0] if block_bytes[0] else usable[0]
    fitting = bisect_right(range(most + 1), available_bytes, key=nbytes) - 1
    limited = device == "cpu" and cache.kv_cache_memory is None
    return min(fitting, usable[0]) if limited else fitting


def split_blocks(
    config: EngineConfig, groups: Sequence[KVGroup], first: int, max_model_len: int
) -> tuple[int, ...]:
    """Returns the blocks of each group if the first has `first`: as many, but in the others no more
    than all sequences together hold. So a window takes what it can use, and full attention the
    rest. States, whose blocks are large, are for as many sequences of `USUAL_TOKENS` tokens as the
    first group holds."""
    usable = most_blocks(config, groups, max_model_len)
    tokens = first * config.cache.block_size
    sequences = -(-tokens // min(max_model_len, USUAL_TOKENS))
    states = min(first, STATES_HELD * sequences)
    others = zip(groups[1:], usable[1:], strict=True)
    return first, *(min(states if group.state else first, most) for group, most in others)


def most_blocks(
    config: EngineConfig, groups: Sequence[KVGroup], max_model_len: int
) -> tuple[int, ...]:
    """Returns the most blocks of each group that the scheduler can use at once."""
    sequences = config.scheduler.seqs
    return tuple(sequences * count for count in blocks_per_sequence(config, groups, max_model_len))


def blocks_per_sequence(
    config: EngineConfig, groups: Sequence[KVGroup], max_model_len: int
) -> tuple[int, ...]:
    """Returns the most blocks of each group that a sequence of `max_model_len` tokens holds."""
    in_flight, size = config.tokens_in_flight, config.cache.block_size
    return tuple(group.most_blocks(max_model_len, in_flight, size) for group in groups)


def fit_context(
    config: EngineConfig, groups: Sequence[KVGroup], num_blocks: int, max_model_len: int
) -> int:
    """Returns the context window in tokens: `max_model_len`, or with --max-model-len auto the most
    up to it of which one sequence fits. `num_blocks`: of the first group, whose windows are the
    longest, so that a sequence fits into the others' too. Raises ConfigError if none fits."""
    longest = max_model_len
    if config.model.max_model_len == AUTO:
        lengths = range(1, max_model_len + 1)
        fitting = bisect_right(
            lengths, num_blocks, key=lambda n: blocks_per_sequence(config, groups, n)[0]
        )
        longest = max(1, fitting)
    check_num_blocks(config, groups, num_blocks, longest)
    return longest


def check_num_blocks(
    config: EngineConfig, groups: Sequence[KVGroup], num_blocks: int, max_model_len: int
) -> None:
    """Raises ConfigError if not even one sequence of `max_model_len` tokens fits. `num_blocks`: of
    the first group, whose windows are the longest."""
    needed = blocks_per_sequence(config, groups, max_model_len)[0]
    if num_blocks >= needed:
        return
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        fix = f"raise --num-gpu-blocks-override to {needed}"
    elif cache.kv_cache_memory is not None:
        fix = f"raise --kv-cache-memory (now {cache.kv_cache_memory})"
    else:
        fix = "give more memory (--kv-cache-memory, --gpu-memory-utilization)"
    raise ConfigError(
        f"the KV cache has {num_blocks} blocks of {cache.block_size} tokens, but one sequence of "
        f"--max-model-len {max_model_len} needs {needed}: {fix}, or lower --max-model-len"
    )
