"""The ranks of a node's replicas, which start and stop together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pdserve.common.config.engine import EngineConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.distributed.executor import Executor
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.draft_model import DraftModel
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.messages import RankReady
from pdserve.common.engine.ngram import PromptLookup
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.speculation import Speculator
from pdserve.common.node.model_facts import ModelFacts
from pdserve.common.worker.worker import ExtensionConfig, WorkerConfig, worker_specs

RANKS_STOP = 5.0  # seconds in which ranks must end by themselves
DRAFTED_SHARE = 4  # a draft model's prefill chunk is --max-num-batched-tokens divided by this

_ready_ranks = msgspec.msgpack.Decoder(RankReady)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Holds a replica's running ranks and its scheduler."""

    executor: Executor
    ready: tuple[RankReady, ...]
    scheduler: Scheduler

    @classmethod
    async def start(
        cls,
        role: str,
        engine: EngineConfig,
        facts: ModelFacts,
        extension: ExtensionConfig | None,
        log: LogConfig,
        replica: int = 0,
    ) -> Ranks:
        """Starts the ranks. Raises ConfigError or NodeError when one cannot start; then none
        runs."""
        parallel = replace(engine.parallel, device=facts.device)  # the same on all hosts
        config = WorkerConfig(replace(engine, parallel=parallel), extension, facts.revision)
        specs = worker_specs(config, role, log, replica)
        executor = make_executor(specs, parallel, facts.device)
        answers = await executor.start()
        ready = tuple(map(_ready_ranks.decode, answers))
        facts = facts.within(engine, ready[0].caches[0].num_blocks)
        pool = KVPool(
            facts.spec.kv_groups,
            [cache.num_blocks for cache in ready[0].caches],
            engine.cache.block_size,
            engine.cache.enable_prefix_caching,
            in_flight=engine.tokens_in_flight,
        )
        scheduler = Scheduler(
            pool,
            engine.scheduler,
            facts.spec.eos_token_ids,
            micro_batches=parallel.pipeline_parallel_size,
            speculator=make_speculator(engine, facts, pool),
            max_model_len=facts.max_model_len,
        )
        return cls(executor, ready, scheduler)


def make_speculator(engine: EngineConfig, facts: ModelFacts, pool: KVPool) -> Speculator | None:
    """Makes the speculator, if one is configured; a draft model's cache has as many blocks as
    `pool`."""
    config = engine.speculation.speculation
    if config is None:
        return None
    if facts.draft is None:
        return PromptLookup(config, facts.max_model_len)
    longest = min(facts.max_model_len, facts.draft.max_position_embeddings)
    own = BlockPool(pool.num_blocks, pool.block_size, pool.prefix_caching)
    chunk = max(1, engine.scheduler.tokens // DRAFTED_SHARE)
    return DraftModel(config, longest, own, chunk, len(facts.draft.kv_groups))


async def start_replicas(
    start: Callable[[int], Coroutine[Any, Any, Ranks]], count: int
) -> list[Ranks]:
    """Starts replicas `0 … count-1` at once; `start` starts one.

    Raises:
        ConfigError, NodeError: as `Ranks.start`, for the first that failed; then no replica runs.
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
    """Stops the ranks of all replicas at once, even if one raises."""
    stopping = [each.executor.shutdown(RANKS_STOP) for each in ranks]
    errors = await asyncio.gather(*stopping, return_exceptions=True)
    for error in filter(None, errors):
        raise error
