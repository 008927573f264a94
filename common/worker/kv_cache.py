"""One rank's KV cache: its dimensions, its size and its memory."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from dataclasses import dataclass, replace
from math import prod

import psutil
import torch

from pdserve.common.config.node import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import memory_left
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import CacheShape
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.device import dtype_name
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.kv_budget import (
    blocks_per_sequence,
    check_num_blocks,
    format_bytes,
    gpu_cache_bytes,
    plan_num_blocks,
)
from pdserve.common.planning.role_plan import adapter_bytes
from pdserve.common.worker.gpu_memory import GpuMemory, check_free
from pdserve.common.worker.graphs import CUDA_GRAPH_BYTES, graph_sizes, kept_bytes
from pdserve.common.worker.runner import ModelRunner, StageLink, num_dummy_blocks

logger = logging.getLogger(__name__)

# Shares of the available RAM without --kv-cache-memory: of one rank, and of all ranks of a node.
CPU_MEMORY_SHARE, CPU_MEMORY_SHARES = 0.1, 0.5
CPU_MEMORY_LIMIT = 4 * 2**30


def dimensions(shape: CacheShape) -> tuple[int, int, int, int, int, int]:
    """Returns `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`; 2 = key, value."""
    return (
        shape.layer_end - shape.layer_start,
        2,
        shape.num_blocks,
        shape.head_end - shape.head_start,
        shape.block_size,
        shape.head_dim,
    )


def torch_dtype(shape: CacheShape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype


def resized(shape: CacheShape, num_blocks: int) -> CacheShape:
    return replace(shape, num_blocks=num_blocks)


def cache_bytes(shape: CacheShape) -> int:
    return prod(dimensions(shape)) * torch_dtype(shape).itemsize


def cache_shape(model: CausalLM, engine: EngineConfig, group: GroupCoordinator) -> CacheShape:
    """Returns this rank's cache shape with one block; `resized` sets the number later."""
    spec, stage = model.spec, model.stage
    head_start, head_end = spec.kv_head_range(group.rank, group.size)
    return CacheShape(
        layer_start=stage.start,
        layer_end=stage.end,
        head_start=head_start,
        head_end=head_end,
        num_blocks=1,
        block_size=engine.cache.block_size,
        head_dim=spec.head_dim,
        dtype=dtype_name(model.dtype),
    )


@dataclass(slots=True)
class KVCache:
    """`tensor` has the dimensions of `shape` and starts as zeros.

    On a CPU its memory is an unnamed file, `fd`, sealed at its size, so that a peer process
    which is handed the descriptor can map it and can never be made to fault by truncation.
    The descriptor is the cache's; `close` closes it, and the memory goes with the tensor.
    """

    tensor: torch.Tensor
    shape: CacheShape
    fd: int | None = None

    @classmethod
    def allocate(cls, shape: CacheShape, device: torch.device, spare: int = 0) -> KVCache:
        """On a GPU its tensor has `spare` blocks more than its shape, which are no sequence's."""
        if device.type == "cpu":
            fd, tensor = _allocate_shared(shape)
            return cls(tensor, shape, fd)
        whole = dimensions(resized(shape, shape.num_blocks + spare))
        return cls(torch.zeros(whole, dtype=torch_dtype(shape), device=device), shape)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _allocate_shared(shape: CacheShape) -> tuple[int, torch.Tensor]:
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = cache_bytes(shape)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    # Pages are taken when first written: an idle node does not hold its whole cache.
    memory = mmap.mmap(fd, size)
    tensor = torch.frombuffer(memory, dtype=torch_dtype(shape))
    return fd, tensor.view(dimensions(shape))


def choose_num_blocks(
    engine: EngineConfig,
    block_bytes: int,
    max_model_len: int,
    room: int,
    group: GroupCoordinator,
    device: torch.device,
) -> int:
    """Returns the number of blocks that fits on every rank of the node. `block_bytes` includes the
    draft model's part of a block."""
    num_blocks = plan_num_blocks(engine, block_bytes, max_model_len, room, device.type)
    everywhere = group.all_gather(torch.tensor([num_blocks], device=device), dim=0)
    num_blocks = int(everywhere.min())
    check_num_blocks(engine, num_blocks, max_model_len)
    size = num_blocks * block_bytes
    if device.type == "cpu":
        check_ram(size)
    else:
        check_free(size, device)
    if group.rank == 0:
        tokens = num_blocks * engine.cache.block_size
        logger.info(
            "# KV blocks: %d (= %d tokens, %s per rank)", num_blocks, tokens, format_bytes(size)
        )
    return num_blocks


# ---- available memory, measured after loading the weights ----


def available_bytes(
    config: EngineConfig,
    model: CausalLM,
    shape: CacheShape,
    max_model_len: int,
    device: torch.device,
    link: StageLink,
    draft_bytes: int = 0,
    memory: GpuMemory | None = None,
) -> int:
    """Returns the bytes for KV blocks of `shape` plus `draft_bytes` each. On a CPU a share of the
    available RAM; on a GPU, which needs its `memory`, the rest of the node's share after its own
    weights, the largest step's activations and what it holds outside torch."""
    if device.type == "cpu":
        sequence = blocks_per_sequence(config, max_model_len) * (cache_bytes(shape) + draft_bytes)
        return cpu_cache_bytes(available_ram(), config.parallel.world_size_across_dp, sequence)
    assert memory is not None, "a rank on a GPU knows its memory"
    peak = _peak_of_largest_step(config, model, shape, max_model_len, device, link)
    others = memory.outside_torch(device)
    if config.lora.enable_lora:  # they are loaded later
        parallel, dtype = config.parallel, dtype_name(model.dtype)
        tp, ep = parallel.tensor_parallel_size, parallel.expert_parallel_size
        others += adapter_bytes(Footprint(model.spec, dtype, tp, ep), config, model.stage)
    return gpu_cache_bytes(memory.total, config.cache.gpu_memory_utilization, others, peak)


def available_ram() -> int:
    """Returns the bytes that the host, or this container if less, has left."""
    host, own = psutil.virtual_memory().available, memory_left()
    return host if own is None else min(host, own)


def cpu_cache_bytes(available: int, ranks: int, sequence: int) -> int:
    """Returns a rank's share of `available` bytes; at least the bytes of one longest `sequence`, if
    all ranks together then still leave half of the memory free."""
    most = available * CPU_MEMORY_SHARES / ranks
    share = min(available * CPU_MEMORY_SHARE, most, CPU_MEMORY_LIMIT)
    return int(max(share, min(sequence, most)))


def check_ram(size: int) -> None:
    """Raises ConfigError if a cache of `size` bytes exceeds the available RAM. Its pages are mapped
    at the first write, so otherwise the kernel would kill the node later, under load."""
    if size > (left := available_ram()):
        raise ConfigError(
            f"a KV cache of {format_bytes(size)} does not fit into the {format_bytes(left)} of "
            "free memory: lower --kv-cache-memory or --num-gpu-blocks-override, or raise the "
            "container's memory limit"
        )


def _peak_of_largest_step(
    config: EngineConfig,
    model: CausalLM,
    shape: CacheShape,
    max_model_len: int,
    device: torch.device,
    link: StageLink,
) -> int:
    """Returns torch's peak bytes in the largest possible step, weights included, plus the memory of
    the CUDA graphs."""
    step = (config.scheduler.tokens, config.max_num_rows)
    blocks = num_dummy_blocks(*step, block_size=shape.block_size)
    cache = KVCache.allocate(resized(shape, blocks), device)
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, cache.tensor, device, True, link).warm_up(*step)
    torch.cuda.synchronize(device)
    peak, sizes = torch.cuda.max_memory_allocated(device), graph_sizes(model, config)
    if not sizes:
        return peak
    graphs = kept_bytes(model, sizes, blocks_per_sequence(config, max_model_len))
    activations = _activations_of_graphs(max(sizes), model, shape, device, link)
    spare = cache_bytes(shape)  # the block for padding
    return peak + graphs + len(sizes) * CUDA_GRAPH_BYTES + activations + spare


def _activations_of_graphs(
    size: int, model: CausalLM, shape: CacheShape, device: torch.device, link: StageLink
) -> int:
    """Returns the bytes that the largest graph computes in; they are all graphs' until the end."""
    cache = KVCache.allocate(shape, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, cache.tensor, device, False, link).warm_up(size, size)  # samples nothing
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
