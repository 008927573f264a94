"""Starting an engine: the model's facts, the ranks, and what pairing needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from common.config.schema import EngineConfig, LogConfig
from common.core.errors import ConfigError
from common.core.model_spec import ModelSpec
from common.core.request import GenerateJob
from common.distributed.executor import Executor
from common.distributed.launch import make_executor
from common.engine.block_pool import BlockPool
from common.engine.job_check import check_job
from common.engine.messages import RankReady
from common.engine.scheduler import Scheduler
from common.engine.worker import (
    ExtensionConfig,
    WorkerConfig,
    device_type,
    stages_of,
    worker_specs,
)
from common.model.dtype import choose_dtype, dtype_name
from common.model.revision import weights_revision


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
        spec = ModelSpec.from_folder(folder)
        max_model_len = config.max_model_len or spec.max_position_embeddings
        spec.check_max_model_len(max_model_len)
        spec.validate_tensor_parallel(engine.parallel.tensor_parallel_size)
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
    """A node's ranks, running."""

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
    ) -> Ranks:
        """Raises ConfigError or NodeError when a rank cannot start; nothing is left then."""
        parallel = replace(engine.parallel, device=facts.device)  # of all hosts
        engine = replace(engine, parallel=parallel)
        specs = worker_specs(WorkerConfig(engine, extension), role, log)
        executor = make_executor(specs, parallel, facts.device)
        answers = await executor.start()
        ready = tuple(msgspec.msgpack.decode(answer, type=RankReady) for answer in answers)
        cache = ready[0].cache
        pool = BlockPool(cache.num_blocks, cache.block_size, engine.cache.enable_prefix_caching)
        if pool.blocks_for(facts.max_model_len) > pool.num_blocks:
            raise ConfigError(f"{pool.num_blocks} KV blocks cannot hold one sequence")
        scheduler = Scheduler(pool, engine.scheduler, facts.spec.eos_token_ids)
        return cls(executor, ready, scheduler)
