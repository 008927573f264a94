"""Starting an engine: the model's facts, the ranks, and what pairing needs to know of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdserve.common.config.node import EngineConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.request import GenerateJob
from pdserve.common.core.sampling import MAX_CHOICES, check_range, check_sampling, check_token_ids
from pdserve.common.distributed.executor import Executor
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import RankReady
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.model.backends import choose_dtype, dtype_name
from pdserve.common.model.revision import weights_revision
from pdserve.common.worker.worker import (
    ExtensionConfig,
    WorkerConfig,
    device_type,
    stages_of,
    worker_specs,
)

RANKS_STOP = 5.0  # seconds ranks get to end by themselves


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model a node serves, known before any weight is read."""

    name: str
    folder: Path
    spec: ModelSpec
    max_model_len: int
    revision: str
    dtype: str
    device: str  # "cpu" or "cuda", of all ranks

    @classmethod
    def read(cls, engine: EngineConfig) -> ModelFacts:
        """Raises ConfigError when this node could not serve the model as configured."""
        config = engine.model
        assert config.model is not None, "resolve_model comes first"
        folder = Path(config.model)
        spec = ModelSpec.from_folder(folder).quantized(config.quantization)
        max_model_len = config.max_model_len or spec.max_position_embeddings
        spec.check_max_model_len(max_model_len)
        parallel = engine.parallel
        spec.validate_tensor_parallel(parallel.tensor_parallel_size)
        spec.validate_expert_parallel(parallel.tensor_parallel_size, parallel.expert_parallel_size)
        stages_of(spec, engine.parallel)
        device = device_type(engine.parallel.device)
        dtype = choose_dtype(config.dtype, spec.dtype, torch.device(device))
        return cls(
            name=config.served_model_name or folder.resolve().name,
            folder=folder,
            spec=spec,
            max_model_len=max_model_len,
            revision=weights_revision(folder, config.load_format, config.seed),
            dtype=dtype_name(dtype),
            device=device,
        )

    def kv_identity(self, block_size: int) -> dict[str, str]:
        """What must be equal wherever this model's KV is to be used."""
        return {
            "weights": self.revision,
            "dtype": self.dtype,
            "quantization": kind.method if (kind := self.spec.quantization) else "none",
            "block_size": str(block_size),
            "layers": str(self.spec.num_layers),
            "kv_heads": str(self.spec.num_kv_heads),
            "head_dim": str(self.spec.head_dim),
        }

    def check(self, job: GenerateJob) -> None:
        """Raises InvalidRequest for a job this model cannot do; a router should have known."""
        check_job(job, self.spec.vocab_size, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A replica's ranks, running."""

    executor: Executor
    ready: tuple[RankReady, ...]
    scheduler: Scheduler

    @classmethod
    async def start(
        cls,
        role: str,
        engine: EngineConfig,
        facts: ModelFacts,
        extension: ExtensionConfig,
        log: LogConfig,
        replica: int = 0,
    ) -> Ranks:
        """Raises ConfigError or NodeError when a rank cannot start; nothing is left then."""
        parallel = replace(engine.parallel, device=facts.device)  # of all hosts
        engine = replace(engine, parallel=parallel)
        specs = worker_specs(WorkerConfig(engine, extension), role, log, replica)
        executor = make_executor(specs, parallel, facts.device)
        answers = await executor.start()
        ready = tuple(msgspec.msgpack.decode(answer, type=RankReady) for answer in answers)
        cache = ready[0].cache
        pool = BlockPool(cache.num_blocks, cache.block_size, engine.cache.enable_prefix_caching)
        if pool.blocks_for(facts.max_model_len) > pool.num_blocks:
            raise ConfigError(f"{pool.num_blocks} KV blocks cannot hold one sequence")
        scheduler = Scheduler(
            pool,
            engine.scheduler,
            facts.spec.eos_token_ids,
            micro_batches=engine.parallel.pipeline_parallel_size,
        )
        return cls(executor, ready, scheduler)


async def start_replicas(
    start: Callable[[int], Coroutine[Any, Any, Ranks]], count: int
) -> list[Ranks]:
    """Starts replicas `0 … count-1` at once; `start` starts one.

    Raises:
        ConfigError, NodeError: as `Ranks.start`, of the first that failed; nothing is left of any.
    """
    starting = [asyncio.create_task(start(replica)) for replica in range(count)]
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for each in starting:
            each.cancel()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        await stop_ranks([each for each in ended if isinstance(each, Ranks)])
        raise


async def stop_ranks(ranks: Iterable[Ranks]) -> None:
    """Stops the ranks of several replicas at once, all of them whatever happens to one."""
    stopping = [each.executor.shutdown(RANKS_STOP) for each in ranks]
    errors = await asyncio.gather(*stopping, return_exceptions=True)
    for error in filter(None, errors):
        raise error


# ---- jobs are checked before anything is spent on them ----


def check_job(job: GenerateJob, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a job this node cannot do; a router should have known."""
    longest = max(len(choice.output_token_ids) for choice in job.choices)
    if len(job.prompt_token_ids) + longest >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(job.prompt_token_ids)} tokens; this node's maximum context "
            f"length is {max_model_len} tokens, prompt and completion together",
            param="prompt",
        )
    if len(job.choices) > MAX_CHOICES:
        raise InvalidRequest(f"{len(job.choices)} choices are more than {MAX_CHOICES}", param="n")
    check_sampling(job.sampling, vocab_size)
    check_token_ids(job.prompt_token_ids, vocab_size, "prompt")
    for choice in job.choices:
        check_range("choice", choice.index, 0, MAX_CHOICES - 1)
        check_token_ids(choice.output_token_ids, vocab_size, "prompt")
