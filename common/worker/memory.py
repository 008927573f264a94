"""How much memory a rank may spend on its KV cache, measured once its weights are loaded."""

from __future__ import annotations

import psutil
import torch

from pdserve.common.config.node import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import memory_left
from pdserve.common.engine.messages import CacheShape
from pdserve.common.model.decoder import CausalLM
from pdserve.common.planning.kv_budget import blocks_per_sequence, format_bytes, gpu_cache_bytes
from pdserve.common.worker.kv_cache import KVCache, cache_bytes, resized
from pdserve.common.worker.neighbours import Neighbours
from pdserve.common.worker.runner import ModelRunner, made_up_blocks

# Of the available RAM, unless --kv-cache-memory says more: a rank's share, and what the ranks of
# a node take together at most.
CPU_MEMORY_SHARE, CPU_MEMORY_SHARES = 0.1, 0.5
CPU_MEMORY_LIMIT = 4 * 2**30


def available_bytes(
    config: EngineConfig,
    model: CausalLM,
    shape: CacheShape,
    max_model_len: int,
    device: torch.device,
    neighbours: Neighbours,
) -> int:
    """For a cache of blocks of `shape`. On a CPU a share of the available RAM; on a GPU what
    --gpu-memory-utilization leaves beside other processes, the weights and the largest step's
    activations."""
    if device.type == "cpu":
        sequence = blocks_per_sequence(config, max_model_len) * cache_bytes(shape)
        return cpu_cache_bytes(available_ram(), config.parallel.world_size_across_dp, sequence)
    peak = _peak_of_largest_step(config, model, shape, device, neighbours)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return gpu_cache_bytes(total, config.cache.gpu_memory_utilization, others, peak)


def available_ram() -> int:
    """Bytes the host has left, or this container if that is less."""
    host, own = psutil.virtual_memory().available, memory_left()
    return host if own is None else min(host, own)


def cpu_cache_bytes(available: int, ranks: int, sequence: int) -> int:
    """A rank's share of `available` bytes: where that is less than one `sequence` of the greatest
    length needs, so much, if the node's ranks together leave half of the memory free."""
    most = available * CPU_MEMORY_SHARES / ranks
    share = min(available * CPU_MEMORY_SHARE, most, CPU_MEMORY_LIMIT)
    return int(max(share, min(sequence, most)))


def check_ram(size: int) -> None:
    """Raises ConfigError when a cache of `size` bytes exceeds what is left. Its pages are taken
    when first written: the kernel would end the node in the midst of its work."""
    if size > (left := available_ram()):
        raise ConfigError(
            f"a KV cache of {format_bytes(size)} does not fit into the {format_bytes(left)} of "
            "memory that are left: lower --kv-cache-memory or --num-gpu-blocks-override, or raise "
            "the container's memory limit"
        )


def _peak_of_largest_step(
    config: EngineConfig,
    model: CausalLM,
    shape: CacheShape,
    device: torch.device,
    neighbours: Neighbours,
) -> int:
    """Bytes torch holds at most, weights included, during the largest step there can be."""
    step = (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
    blocks = made_up_blocks(*step, block_size=shape.block_size)
    cache = KVCache.allocate(resized(shape, blocks), device)
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, cache.tensor, device, True, neighbours).warm_up(*step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
