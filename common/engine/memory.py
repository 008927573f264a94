"""How much memory a rank may spend on its KV cache, measured once its weights are loaded."""

from __future__ import annotations

import psutil
import torch

from common.config.schema import EngineConfig
from common.engine.kv_cache import KVCache, resized
from common.engine.messages import CacheShape
from common.engine.neighbours import Neighbours
from common.engine.runner import ModelRunner, made_up_blocks
from common.model.decoder import CausalLM
from common.model.kv_budget import gpu_cache_bytes

# Of the available RAM, unless --kv-cache-memory says more: a rank's share, and what the ranks of
# a node take together at most.
CPU_MEMORY_SHARE, CPU_MEMORY_SHARES = 0.1, 0.5
CPU_MEMORY_LIMIT = 4 * 2**30


def available_bytes(
    config: EngineConfig,
    model: CausalLM,
    shape: CacheShape,
    device: torch.device,
    neighbours: Neighbours,
) -> int:
    """On a CPU a share of the available RAM; on a GPU what --gpu-memory-utilization leaves
    beside other processes, the weights and the largest step's activations."""
    if device.type == "cpu":
        share = min(CPU_MEMORY_SHARE, CPU_MEMORY_SHARES / config.parallel.world_size_across_dp)
        return int(min(psutil.virtual_memory().available * share, CPU_MEMORY_LIMIT))
    peak = _peak_of_largest_step(config, model, shape, device, neighbours)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return gpu_cache_bytes(total, config.cache.gpu_memory_utilization, others, peak)


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
