"""Builds a rank: device, group, weights, cache, runner and extension, in this order.

`worker_specs` makes the specs of a replica's ranks; their factory is `build_worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import gcd

import msgspec
import torch

from pdserve.common.config.engine import CacheConfig, EngineConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import host_errors_as_config_errors, is_loopback, usable_cores
from pdserve.common.core.plugins import import_string
from pdserve.common.core.quantization import QUANTIZATIONS
from pdserve.common.core.waits import saying
from pdserve.common.distributed.all2all import make_all2all
from pdserve.common.distributed.environment import (
    DistributedEnvironment,
    init_distributed_environment,
)
from pdserve.common.distributed.executor import Emit, Extension, WorkerSpec
from pdserve.common.distributed.links import describe_cost, measure_stages
from pdserve.common.distributed.parallel_state import (
    ParallelState,
    initialize_model_parallel,
)
from pdserve.common.engine.messages import Peaks, RankReady, StepDelta
from pdserve.common.model.device import choose_device, choose_dtype, choose_kernels, dtype_name
from pdserve.common.model.implementation import load_decoder
from pdserve.common.model.kernels.gpu import needs
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import stages_of
from pdserve.common.planning.kv_budget import fit_context, format_bytes
from pdserve.common.worker.adapters import AdapterExtension, RankAdapters
from pdserve.common.worker.drafter import Drafter, load_draft_model
from pdserve.common.worker.folders import open_folders
from pdserve.common.worker.gpu_memory import GpuMemory
from pdserve.common.worker.grammar import Grammars
from pdserve.common.worker.graphs import build_graphs, graph_sizes
from pdserve.common.worker.input_batch import InputBatch
from pdserve.common.worker.kv_cache import (
    KVCache,
    available_bytes,
    cache_bytes,
    cache_shapes,
    choose_num_blocks,
    resized,
)
from pdserve.common.worker.lent_cores import LentCores, join_lent_cores
from pdserve.common.worker.peaks import peaks_of
from pdserve.common.worker.runner import ModelRunner, StageLink
from pdserve.common.worker.sampler import compile_kernels
from pdserve.common.worker.token_feed import TokenFeed

logger = logging.getLogger(__name__)

WARMING_UP = "warming up: running the first steps, which compile kernels on a GPU"


@dataclass(frozen=True, slots=True)
class ExtensionConfig:
    """The extension that a rank hosts. Its factory is called as
    `factory(caches, shared_fd, rank, host, config, emit)`. `caches`, a `GroupCache` per KV group,
    and the descriptor belong to the rank and outlive the extension. `host`: the rank's address to
    bind to (--kv-host)."""

    factory: str  # "module:callable"
    config: bytes = field(default=b"", repr=False)  # it may hold secrets
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The `WorkerSpec.config` of the engine's ranks. `engine.model.model` is a folder."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    extension: ExtensionConfig | None = None
    revision: str = ""  # of the node's copy of the weights; "": not compared


def worker_specs(
    config: WorkerConfig, role: str = "node", log: LogConfig | None = None, replica: int = 0
) -> list[WorkerSpec]:
    """Returns one spec per rank of a replica, for `make_executor`. The first rank of the last stage
    samples."""
    parallel = config.engine.parallel
    size = parallel.world_size
    return [
        WorkerSpec(
            factory="pdserve.common.worker.worker:build_worker",
            rank=rank,
            world_size=size,
            output_rank=size - parallel.tensor_parallel_size,
            local_rank=replica * size + rank,
            local_world_size=parallel.world_size_across_dp,
            init_method="",
            config=msgspec.to_builtins(config, builtin_types=(bytes,)),
            role=role if parallel.data_parallel_size == 1 else f"{role}.{replica}",
            log=log or LogConfig(),
        )
        for rank in range(size)
    ]


@host_errors_as_config_errors()
@saying("preparing device, memory and KV cache")
def build_worker(spec: WorkerSpec, emit: Emit) -> ModelWorker:
    """Builds rank `spec.rank`. Blocks until all ranks have joined and the weights are loaded.

    Raises:
        ConfigError: the model, its files or the memory do not allow this configuration.
        NodeError: another rank did not join, died, or has another dtype or context window.
    """
    config = msgspec.convert(spec.config, WorkerConfig)
    engine = config.engine
    device = choose_device(engine.parallel.device, spec.local_rank)
    memory = _enter(device, engine.cache)
    with saying("connecting the ranks"):
        environment, state = _init_distributed(spec, engine, device)
    folders = open_folders(engine, state.world)
    if environment.is_first_of_host and config.revision:
        folders.check_revision(config.revision)
    model_spec, max_model_len = folders.read_model()
    replicas = engine.parallel.data_parallel_size
    _set_threads(engine.parallel.cpu_threads, replicas * environment.local_world_size)
    extension_config = config.extension and resolve_host(config.extension, environment)
    dtype = choose_dtype(engine.model.dtype, model_spec.dtype, device)
    # Hosts may choose different dtypes by their CPU, and read their own copies of the folder.
    state.world.agree([dtype_name(dtype), max_model_len], "dtype and context window")
    stage = stages_of(model_spec, engine.parallel)[state.pp.rank]
    all_reduces = 2 * stage.num_layers + int(stage.first)  # the embedding
    spanned = measure_stages(environment, state, all_reduces)
    if spanned and spec.rank == 0:
        # On CPUs ranks add up in float32.
        itemsize = torch.float32.itemsize if device.type == "cpu" else dtype.itemsize
        row_bytes = model_spec.hidden_size * itemsize
        logger.info(describe_cost(spanned, row_bytes, engine.scheduler.tokens))
    all2all = make_all2all(engine.parallel.all2all_backend, state.ep)
    kernels = choose_kernels(engine.parallel.cpu_kernels, device, spec.rank)
    sharding = Sharding(
        state.tp, device, dtype, all2all, None, kernels, engine.cache.kv_cache_dtype
    )
    if model_spec.stored is not None and spec.rank == 0:
        kept = kernels.products is not None and model_spec.on_gpus().quantization is not None
        rounded = QUANTIZATIONS.get(engine.model.quantization or "")
        logger.info(
            "the weights are stored as %s and dequantized to %s while they are loaded%s; "
            "activations stay in that dtype",
            model_spec.stored,
            rounded.method if rounded else dtype_name(dtype),
            ", but linear layers keep 8 bits" if kept and not rounded else "",
        )
    log = _LoadingLog(spec.rank)
    with saying(log.describe):
        model = load_decoder(model_spec, engine.model, sharding, stage, log, folders.model)
        draft_model = load_draft_model(engine, sharding, folders.draft)
    peaks = peaks_of(engine.machine, device, dtype, model.weights_bytes, model.kernels)
    link = StageLink(state, model_spec.hidden_size, dtype)
    shapes = cache_shapes(model, engine, state.tp)
    draft_shapes = cache_shapes(draft_model, engine, state.tp) if draft_model else ()
    block_bytes = list(map(cache_bytes, shapes))
    block_bytes[0] += sum(map(cache_bytes, draft_shapes))
    room = available_bytes(engine, model, shapes, block_bytes, max_model_len, device, link, memory)
    num_blocks = choose_num_blocks(
        engine, model_spec.kv_groups, block_bytes, max_model_len, room, state.world, device
    )
    max_model_len = fit_context(engine, model_spec.kv_groups, num_blocks[0], max_model_len)
    spare = int(bool(graph_sizes(model, engine)))  # a block for the padding of graphs
    cache = KVCache.allocate(list(map(resized, shapes, num_blocks)), device, spare)
    samples = spec.rank == spec.output_rank
    lora = engine.lora
    adapters = RankAdapters(model, lora.max_lora_rank) if lora.enable_lora else None
    size = engine.cache.block_size
    feed = TokenFeed(state.tp) if engine.scheduler.async_scheduling else None
    runner = ModelRunner(model, cache.tensors, device, samples, link, adapters, size, feed)
    with saying(WARMING_UP):
        _warm_up(runner, engine)
        runner.graphs = build_graphs(model, cache.tensors, engine, max_model_len)
    drafter = None
    if draft_model is not None:
        sizes = [resized(shape, num_blocks[0]) for shape in draft_shapes]
        draft_cache = KVCache.allocate(sizes, device)
        drafter = Drafter(draft_model, draft_cache, device, state.tp)
        with saying(WARMING_UP):
            _warm_up(drafter.runner, engine)
    extension = _build_extension(extension_config, cache, spec.rank, emit)
    if adapters is not None:
        extension = AdapterExtension(adapters, extension)
    state.serve()
    grammars = Grammars(lambda: folders.read_grammar_tokens(model_spec))
    lent_cores = join_lent_cores(
        engine.parallel.share_cores, torch.get_num_threads(), usable_cores(), kernels
    )
    return ModelWorker(
        spec.rank, state, runner, cache, peaks, extension, grammars, drafter, lent_cores, feed
    )


class ModelWorker:
    """One rank of the engine (a `pdserve.common.distributed.executor.Worker`)."""

    def __init__(
        self,
        rank: int,
        state: ParallelState,
        runner: ModelRunner,
        cache: KVCache,
        peaks: Peaks,
        extension: Extension | None,
        grammars: Grammars,
        drafter: Drafter | None = None,
        lent_cores: LentCores | None = None,
        feed: TokenFeed | None = None,
    ) -> None:
        self._rank = rank
        self._state = state
        self.runner = runner
        self._cache = cache
        self._peaks = peaks
        self.extension = extension
        self._drafter = drafter
        self._lent_cores = lent_cores
        self._grammars = grammars
        self._batch = InputBatch(
            runner.block_size,
            runner.model.spec.vocab_size,
            runner.device,
            runner.samples,
            grammars,
            feed,
        )
        # The next step may come before the result: it is queued behind this one on the GPU.
        self._answers_later = feed is not None and runner.device.type == "cuda"
        self._decoder = msgspec.msgpack.Decoder(StepDelta)
        self._encoder = msgspec.msgpack.Encoder()

    def ready(self) -> bytes:
        ready = RankReady(
            rank=self._rank,
            caches=tuple(each.shape for each in self._cache.groups),
            weights_bytes=self.runner.model.weights_bytes,
            peaks=self._peaks,
            extension_info=self.extension.info() if self.extension else b"",
            cores=self._lent_cores.own if self._lent_cores else (),
        )
        return self._encoder.encode(ready)

    def step(self, message: bytes) -> bytes | Callable[[], bytes]:
        with self._lent_cores.computing() if self._lent_cores else nullcontext():
            return self._step(message)

    def _step(self, message: bytes) -> bytes | Callable[[], bytes]:
        delta = self._decoder.decode(message)
        if self._drafter is not None:
            delta = self._drafter.complete(delta)
        result = self.runner.begin(self._batch.apply(delta))
        if self._answers_later:
            return lambda: self._encoder.encode(result())
        return self._encoder.encode(result())

    def close(self) -> None:
        """Captured collectives must be gone, and queued ones done, before their communicators."""
        self._grammars.close()
        if self._lent_cores is not None:
            self._lent_cores.close()
        self.runner.close()
        self._state.close()
        self._cache.close()
        if self._drafter is not None:
            self._drafter.close()


# ---- the stages of build_worker ----


def _enter(device: torch.device, cache: CacheConfig) -> GpuMemory | None:
    """Makes the GPU this thread's device; nothing may use it before. Raises ConfigError if Triton
    cannot compile kernels here, or less than the node's share is free, unless the options state the
    cache's size."""
    if device.type == "cpu":
        return None
    needs.use_cache_dir()
    if lack := needs.missing():
        raise ConfigError(f"on a GPU {lack}")
    memory = GpuMemory.enter(device)
    if cache.num_gpu_blocks_override is None and cache.kv_cache_memory is None:
        memory.check_share(cache.gpu_memory_utilization)
    return memory


def _set_threads(requested: int, local_world_size: int) -> None:
    """Sets torch's threads; by default `local_world_size` ranks share the usable cores."""
    torch.set_num_threads(requested or max(1, usable_cores() // local_world_size))


def resolve_host(config: ExtensionConfig, environment: DistributedEnvironment) -> ExtensionConfig:
    """Returns `config` with host "auto" replaced by this rank's address.

    Raises:
        ConfigError: the host is a loopback address, and the ranks are on several hosts.
    """
    if config.host == "auto":
        return replace(config, host=environment.address_for_others)
    if len(set(environment.hosts)) > 1 and is_loopback(config.host):
        raise ConfigError(
            f"--kv-host {config.host} can be reached only from its own host, and this node's ranks "
            "are on several hosts: pass --kv-host auto"
        )
    return config


def _init_distributed(
    spec: WorkerSpec, engine: EngineConfig, device: torch.device
) -> tuple[DistributedEnvironment, ParallelState]:
    parallel = engine.parallel
    environment = init_distributed_environment(
        spec.rank,
        spec.world_size,
        spec.init_method,
        device,
        parallel.distributed_timeout,
        parallel.device_communicator,
    )
    return environment, initialize_model_parallel(
        environment,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.expert_parallel_size,
    )


class _LoadingLog:
    """Logs the progress of loading at each quarter, on rank 0."""

    def __init__(self, rank: int) -> None:
        self._quiet = rank != 0
        self._quarters = 0
        self._percent = 0

    def describe(self) -> str:
        return f"loading weights ({self._percent} %)"

    def __call__(self, done: int, total: int) -> None:
        quarters, self._percent = 4 * done // max(total, 1), 100 * done // max(total, 1)
        if quarters > self._quarters and not self._quiet:
            logger.info("loading weights: %d %% of %s", 25 * quarters, format_bytes(total))
        self._quarters = quarters


def _warm_up(runner: ModelRunner, engine: EngineConfig) -> None:
    """Runs the largest step on a GPU, and one of single queries. On a CPU, without such kernels,
    a short step checks that the ranks compute together."""
    scheduler = engine.scheduler
    if runner.device.type == "cuda":
        if runner.samples and runner.model.stage.last:
            compile_kernels(runner.model.spec.vocab_size, runner.device)
        runner.warm_up(scheduler.tokens, engine.max_num_rows)
        # Single queries have a kernel of their own, which is compiled at its first use.
        runner.warm_up(scheduler.seqs, scheduler.seqs)
        for count in _kernel_sizes(runner, engine):
            # As many rows as divide the tokens, or there would be more tokens.
            runner.warm_up(count, gcd(count, 1 << (engine.max_num_rows.bit_length() - 1)))
    else:
        runner.warm_up(num_tokens=engine.cache.block_size, num_seqs=1)


def _kernel_sizes(runner: ModelRunner, engine: EngineConfig) -> Iterator[int]:
    """Yields the numbers of tokens that together use all kernels for quantized matrices, which are
    compiled at their first use."""
    products = runner.model.kernels.products
    counts = () if products is None else products.token_counts
    yield from (count for count in counts if count < engine.scheduler.tokens)


def _build_extension(
    config: ExtensionConfig | None, cache: KVCache, rank: int, emit: Emit
) -> Extension | None:
    if config is None:
        return None
    extension: Extension = import_string(config.factory)(
        cache.groups, cache.fd, rank, config.host, config.config, emit
    )
    return extension
