"""One rank's KV cache: its dimensions, its size and its memory."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path

import psutil
import torch

from pdserve.common.config.engine import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import memory_left, memory_limit
from pdserve.common.core.kv_groups import STATES_HELD, KVGroup
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import CacheShape
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.device import dtype_name
from pdserve.common.model.implementation import read_weights_of
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.kv_budget import (
    blocks_per_sequence,
    fit_context,
    format_bytes,
    gpu_cache_bytes,
    plan_num_blocks,
    split_blocks,
)
from pdserve.common.planning.role_plan import adapter_bytes
from pdserve.common.worker.gpu_memory import GpuMemory, check_free
from pdserve.common.worker.graphs import CUDA_GRAPH_BYTES, graph_sizes, kept_bytes
from pdserve.common.worker.runner import ModelRunner, StageLink, num_dummy_blocks

logger = logging.getLogger(__name__)

# Shares of the RAM without --kv-cache-memory: of one rank, and of all ranks of a host.
CPU_MEMORY_SHARE, CPU_MEMORY_SHARES = 0.1, 0.5
CPU_MEMORY_LIMIT = 4 * 2**30


def dimensions(shape: CacheShape) -> tuple[int, int, int, int, int, int]:
    """Returns `[num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim]`."""
    return (
        shape.layer_end - shape.layer_start,
        shape.planes,
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


def cache_shapes(
    model: Decoder, engine: EngineConfig, ranks: GroupCoordinator
) -> tuple[CacheShape, ...]:
    """Returns the shapes of this rank's cache, one per KV group, with one block each; `resized`
    sets the number later. `ranks`: those of the stage. Raises ConfigError if chunks of attention
    do not begin with a block."""
    spec, stage, block_size = model.spec, model.stage, engine.cache.block_size
    for group in spec.kv_groups:
        if group.chunked and group.window and group.window % block_size:
            raise ConfigError(
                f"--block-size {block_size} does not divide the {group.window} tokens of a chunk, "
                f"within which {spec.architecture} attends: choose one that does"
            )
    return tuple(
        CacheShape(
            *group.layers_between(stage.start, stage.end),
            *group.head_range(ranks.rank, ranks.size),
            1,  # block
            group.page(block_size)[0],
            *group.row(dtype_name(model.dtype), attention.kv_cache_dtype),
            planes=group.planes,
        )
        for group, attention in zip(spec.kv_groups, model.attentions, strict=True)
    )


@dataclass(frozen=True, slots=True)
class GroupCache:
    """The cache of one KV group: `tensor` has the dimensions of `shape`, and begins at byte
    `offset` of the cache's memory file, if there is one."""

    tensor: torch.Tensor
    shape: CacheShape
    offset: int = 0


@dataclass(slots=True)
class KVCache:
    """The caches of all KV groups, which start as zeros.

    On a CPU their memory is an unnamed file, `fd`, sealed at its size, so that a peer process
    which is handed the descriptor can map it and can never be made to fault by truncation.
    The descriptor is the cache's; `close` closes it, and the memory goes with the tensors.
    """

    groups: tuple[GroupCache, ...]
    fd: int | None = None

    @classmethod
    def allocate(
        cls, shapes: Sequence[CacheShape], device: torch.device, spare: int = 0
    ) -> KVCache:
        """Allocates the cache. On a GPU each tensor has `spare` extra blocks, which no sequence
        uses."""
        if device.type == "cpu":
            return _allocate_shared(shapes)
        caches = []
        for shape in shapes:
            whole = dimensions(resized(shape, shape.num_blocks + spare))
            tensor = torch.zeros(whole, dtype=torch_dtype(shape), device=device)
            caches.append(GroupCache(tensor, shape))
        return cls(tuple(caches))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(each.tensor for each in self.groups)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _allocate_shared(shapes: Sequence[CacheShape]) -> KVCache:
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    sizes = [cache_bytes(shape) for shape in shapes]
    os.ftruncate(fd, sum(sizes))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    # Pages are taken when first written: an idle node does not hold its whole cache.
    memory = torch.frombuffer(mmap.mmap(fd, sum(sizes)), dtype=torch.uint8)
    caches = []
    for shape, part, end in zip(shapes, memory.split(sizes), accumulate(sizes), strict=True):
        tensor = part.view(torch_dtype(shape)).view(dimensions(shape))
        caches.append(GroupCache(tensor, shape, end - part.nbytes))
    return KVCache(tuple(caches), fd)


def choose_num_blocks(
    engine: EngineConfig,
    groups: Sequence[KVGroup],
    block_bytes: Sequence[int],
    max_model_len: int,
    room: int,
    ranks: GroupCoordinator,
    device: torch.device,
) -> tuple[int, ...]:
    """Returns the number of blocks of each KV group that fits on every rank of the node.
    `block_bytes`: of a block in each group, with the draft model's part."""
    first = plan_num_blocks(engine, groups, block_bytes, max_model_len, room, device.type)
    everywhere = ranks.all_gather(torch.tensor([first], device=device), dim=0)
    num_blocks = split_blocks(engine, groups, int(everywhere.min()), max_model_len)
    fit_context(engine, groups, num_blocks[0], max_model_len)  # raises ConfigError if it cannot
    sizes = list(map(mul, num_blocks, block_bytes))
    if device.type == "cpu":
        check_ram(sum(sizes))
    else:
        check_free(sum(sizes), device)
    if ranks.rank == 0:
        for group, count, size in zip(groups, num_blocks, sizes, strict=True):
            tokens = count * engine.cache.block_size
            logger.info(
                "# KV blocks%s: %d (= %s, %s per rank)",
                f" of {group.name}" if len(groups) > 1 else "",
                count,
                f"for {count // STATES_HELD} sequences" if group.state else f"{tokens} tokens",
                format_bytes(size),
            )
    return num_blocks


# ---- available memory, measured after loading the weights ----


def available_bytes(
    config: EngineConfig,
    model: Decoder,
    shapes: Sequence[CacheShape],
    block_bytes: Sequence[int],
    max_model_len: int,
    device: torch.device,
    link: StageLink,
    memory: GpuMemory | None = None,
) -> int:
    """Returns the bytes for KV blocks of `block_bytes` per KV group. On a CPU a share of the RAM
    without weights, whatever else uses it at the moment, so that equal nodes have equal caches; on
    a GPU, which needs its `memory`, the rest of the node's share after its own weights, the largest
    step's activations and what it holds outside torch."""
    if device.type == "cpu":
        counts = blocks_per_sequence(config, model.spec.kv_groups, max_model_len)
        sequence = sum(map(mul, counts, block_bytes))
        ranks = config.parallel.host_nodes * config.parallel.world_size_across_dp
        room = total_ram() - ranks * model.weights_bytes
        return cpu_cache_bytes(room, ranks, sequence)
    assert memory is not None, "a rank on a GPU knows its memory"
    peak = _peak_of_largest_step(config, model, shapes, max_model_len, device, link)
    others = memory.outside_torch(device)
    if config.lora.enable_lora:  # they are loaded later
        parallel, dtype = config.parallel, dtype_name(model.dtype)
        tp, ep = parallel.tensor_parallel_size, parallel.expert_parallel_size
        weights_of = read_weights_of(
            model.spec, Path(config.model.model or ""), config.model.overrides
        )
        footprint = Footprint(model.spec, dtype, tp, ep, weights_of=weights_of)
        others += adapter_bytes(footprint, config, model.stage)
    return gpu_cache_bytes(memory.total, config.cache.gpu_memory_utilization, others, peak)


def total_ram() -> int:
    """Returns the bytes that the host, or this container if less, may use altogether."""
    host, own = psutil.virtual_memory().total, memory_limit()
    return host if own is None else min(host, own)


def available_ram() -> int:
    """Returns the bytes that the host, or this container if less, has left."""
    host, own = psutil.virtual_memory().available, memory_left()
    return host if own is None else min(host, own)


def cpu_cache_bytes(room: int, ranks: int, sequence: int) -> int:
    """Returns a rank's share of `room` bytes; at least the bytes of one longest `sequence`, if all
    `ranks` of the host together then still leave half of the room."""
    most = max(0, room) * CPU_MEMORY_SHARES / ranks
    share = min(room * CPU_MEMORY_SHARE, most, CPU_MEMORY_LIMIT)
    return int(max(share, min(sequence, most)))


def check_ram(size: int) -> None:
    """Raises ConfigError if a cache of `size` bytes exceeds the available RAM. Its pages are mapped
    at the first write, so otherwise the kernel would kill the node later, under load."""
    if size > (left := available_ram()):
        raise ConfigError(
            f"a KV cache of {format_bytes(size)} does not fit into the {format_bytes(left)} of "
            "free memory: set a smaller --kv-cache-memory or --num-gpu-blocks-override, end other "
            "programs, or raise the container's memory limit"
        )


def _peak_of_largest_step(
    config: EngineConfig,
    model: Decoder,
    shapes: Sequence[CacheShape],
    max_model_len: int,
    device: torch.device,
    link: StageLink,
) -> int:
    """Returns torch's peak bytes in the largest possible step, weights included, plus the memory of
    the CUDA graphs."""
    step, block_size = (config.scheduler.tokens, config.max_num_rows), config.cache.block_size
    blocks = num_dummy_blocks(*step, block_size)
    cache = KVCache.allocate([resized(shape, blocks) for shape in shapes], device)
    torch.cuda.reset_peak_memory_stats(device)
    runner = ModelRunner(model, cache.tensors, device, True, link, block_size=block_size)
    runner.warm_up(*step)
    torch.cuda.synchronize(device)
    peak, sizes = torch.cuda.max_memory_allocated(device), graph_sizes(model, config)
    if not sizes:
        return peak
    blocks_of_one = blocks_per_sequence(config, model.spec.kv_groups, max_model_len)
    graphs = kept_bytes(model, sizes, blocks_of_one)
    activations = _activations_of_graphs(max(sizes), model, shapes, device, link)
    spare = sum(map(cache_bytes, shapes))  # the blocks for padding
    return peak + graphs + len(sizes) * CUDA_GRAPH_BYTES + activations + spare


def _activations_of_graphs(
    size: int,
    model: Decoder,
    shapes: Sequence[CacheShape],
    device: torch.device,
    link: StageLink,
) -> int:
    """Returns the bytes of the largest graph's activations, which all graphs share and keep."""
    cache = KVCache.allocate(shapes, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, cache.tensors, device, False, link).warm_up(size, size)  # samples nothing
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
