"""Plans whether a role's node fits on GPUs of a given size, its KV cache, and possible fixes.

Plain arithmetic: loads nothing and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import mul
from typing import Any

from pdserve.common.config.engine import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.quantization import QUANTIZATIONS
from pdserve.common.model.rank_weights import WeightsOf
from pdserve.common.model.stages import Stage, stages_of
from pdserve.common.planning.footprint import Footprint, overhead
from pdserve.common.planning.kv_budget import (
    blocks_per_sequence,
    format_bytes,
    gpu_cache_bytes,
    plan_num_blocks,
    split_blocks,
)

MAX_FIXED_SIZE = 64  # ranks per dimension that a fix may propose


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The model, options and GPU of a node to plan."""

    spec: ModelSpec
    engine: EngineConfig
    max_model_len: int
    gpu_memory: int  # bytes of each GPU
    weights_of: WeightsOf | None = None  # of a model of transformers

    @property
    def tp(self) -> int:
        return self.engine.parallel.tensor_parallel_size

    @property
    def pp(self) -> int:
        return self.engine.parallel.pipeline_parallel_size

    @property
    def ep(self) -> int:
        return self.engine.parallel.expert_parallel_size

    @property
    def dtype(self) -> str:
        dtype = self.engine.model.dtype
        return self.spec.dtype if dtype == "auto" else dtype

    @property
    def kv_cache_dtype(self) -> str:
        return self.engine.cache.kv_cache_dtype

    @property
    def footprint(self) -> Footprint:
        return replace(self.whole, tp=self.tp, ep=self.ep)

    @property
    def whole(self) -> Footprint:
        """The footprint of the whole model on one rank."""
        kv_cache_dtype, weights_of = self.kv_cache_dtype, self.weights_of
        return Footprint(
            self.spec, self.dtype, kv_cache_dtype=kv_cache_dtype, weights_of=weights_of
        )

    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.spec, self.engine.parallel)

    def check(self) -> None:
        """Raises ConfigError if a node would refuse these options, whatever its memory."""
        self.spec.check_max_model_len(self.max_model_len)
        self.spec.check_kv_cache_dtype(self.kv_cache_dtype)
        self.spec.validate_tensor_parallel(self.tp)
        self.spec.validate_expert_parallel(self.tp, self.ep)
        for stage in self.stages():
            self.footprint.weights(stage)


@dataclass(frozen=True, slots=True)
class GroupBudget:
    """The cache of one KV group on one GPU."""

    name: str
    num_layers: int
    block_bytes: int
    num_blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankBudget:
    """The memory of one GPU of a stage, in bytes. The KV cache gets the rest, in whole blocks."""

    stage: int
    num_layers: int
    usable: int  # --gpu-memory-utilization of the GPU
    weights: int
    activations: int  # estimated peak of the largest step
    overhead: int  # estimate of context, workspaces and communicators
    loading: int  # estimated peak beside the weights while they are rounded to int8
    adapters: int  # --max-loras LoRA adapters of --max-lora-rank
    left_for_kv: int  # negative: it does not fit even without KV
    kv_per_token: int
    kv_per_sequence: int  # of max_model_len tokens, in whole blocks; windows' and states' are freed
    num_blocks: int  # of the first KV group
    groups: tuple[GroupBudget, ...]

    @property
    def loaded(self) -> int:
        """The peak while weights are loaded, before steps and KV cache."""
        return self.weights + self.loading + self.overhead


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan of one node of a role. `rank` is of the stage with the fewest blocks, because every
    stage uses that number. Sizes are in bytes."""

    role: str  # "prefill" or "decode"
    tensor_parallel_size: int
    expert_parallel_size: int
    pipeline_partition: tuple[int, ...]  # layers of each stage
    dtype: str
    quantization: str | None  # "int8" or "int4", for linear layers
    stored: str | None  # the format of weights that are dequantized while they are loaded
    parameters: int
    active_parameters: int  # parameters that compute one token; fewer in an MoE model
    parameter_bytes: int  # parameters × bits per weight, as if all weights were quantized
    weights: int  # of the whole model, stored once
    kv_per_token: int  # of the whole model
    rank: RankBudget
    num_tokens: int | None  # that fit; None: the model keeps states alone, whatever the tokens
    max_sequences: int  # of max_model_len tokens that fit
    max_concurrent_sequences: int  # the same, at most --max-num-seqs
    step_tokens: int  # tokens in the role's largest usual step
    all_reduce_per_token: int
    all_reduce_per_step: int
    fits: bool
    reason: str
    fixes: tuple[str, ...]  # single changes, each of which makes it fit


def plan_role(role: str, setup: NodeSetup) -> RolePlan:
    """Plans one node of the role.

    Raises:
        ConfigError: a node would refuse the options, whatever its memory.
    """
    setup.check()
    rank, whole = tightest_rank(setup), Stage.whole(setup.spec.num_layers)
    problem = _problem(setup, rank)
    scheduler, footprint = setup.engine.scheduler, setup.footprint
    # A decode step computes a token of each sequence, a prefill step a chunk of prompts.
    prefill = role == "prefill"
    step_tokens = scheduler.tokens if prefill else scheduler.seqs
    numbers = Footprint(replace(setup.spec, quantization=None), "float32")
    parameters = numbers.weights(whole) // 4
    kind = setup.spec.quantization
    kind = None if kind is not None and kind.scaled else kind  # `stored` says it
    bits = kind.bits if kind else 8 * footprint.item
    longest = blocks_per_sequence(setup.engine, setup.spec.kv_groups, setup.max_model_len)
    sequences = min(
        group.num_blocks // count for group, count in zip(rank.groups, longest, strict=True)
    )
    return RolePlan(
        role=role,
        tensor_parallel_size=setup.tp,
        expert_parallel_size=setup.ep,
        pipeline_partition=tuple(stage.num_layers for stage in setup.stages()),
        dtype=setup.dtype,
        quantization=f"int{bits}" if kind else None,
        stored=_stored(setup.spec),
        parameters=parameters,
        active_parameters=parameters - numbers.idle_weights() // 4,
        parameter_bytes=parameters * bits // 8,
        weights=setup.whole.weights(whole),
        kv_per_token=setup.whole.kv_per_token(whole),
        rank=rank,
        num_tokens=_num_tokens(setup, rank),
        max_sequences=sequences,
        max_concurrent_sequences=min(sequences, scheduler.seqs),
        step_tokens=step_tokens,
        all_reduce_per_token=footprint.all_reduces(setup.spec.num_layers, 1),
        all_reduce_per_step=footprint.all_reduces(setup.spec.num_layers, step_tokens),
        fits=problem is None,
        reason=problem or _room(rank),
        fixes=tuple(_fixes(setup, rank)) if problem else (),
    )


def _stored(spec: ModelSpec) -> str | None:
    if spec.stored is None:
        return None
    scaled = spec.quantization is not None and spec.quantization.scaled
    how = "8 bits stay in linear layers" if scaled else "dequantized while loaded"
    return f"{spec.stored}, {how}"


def _num_tokens(setup: NodeSetup, rank: RankBudget) -> int | None:
    """Returns how many tokens the rank's cache holds; None: a model of states alone."""
    alone = setup.spec.kv_groups[0].state
    return None if alone else rank.num_blocks * setup.engine.cache.block_size


def tightest_rank(setup: NodeSetup) -> RankBudget:
    """Returns the budget of the rank with the fewest blocks; among equals, the least memory
    left. First come those that cannot load their weights."""
    budgets = [_budget(setup, index, stage) for index, stage in enumerate(setup.stages())]
    return min(budgets, key=lambda it: (it.loaded <= it.usable, it.num_blocks, it.left_for_kv))


def _budget(setup: NodeSetup, index: int, stage: Stage) -> RankBudget:
    footprint, engine = setup.footprint, setup.engine
    scheduler, utilization = engine.scheduler, engine.cache.gpu_memory_utilization
    weights = footprint.weights(stage)
    activations = footprint.activations(stage, scheduler.tokens, scheduler.seqs)
    others, adapters = overhead(setup.tp * setup.pp), adapter_bytes(footprint, engine, stage)
    peak = weights + activations + adapters
    left = gpu_cache_bytes(setup.gpu_memory, utilization, others, peak)
    groups = setup.spec.kv_groups
    block_bytes = footprint.kv_of_blocks(stage, engine.cache.block_size)
    window, longest = setup.max_model_len, blocks_per_sequence(engine, groups, setup.max_model_len)
    first = plan_num_blocks(engine, groups, block_bytes, window, left, "cuda")
    num_blocks = split_blocks(engine, groups, first, window)
    return RankBudget(
        stage=index,
        num_layers=stage.num_layers,
        usable=int(setup.gpu_memory * utilization),
        weights=weights,
        activations=activations,
        overhead=others,
        loading=footprint.loading(stage),
        adapters=adapters,
        left_for_kv=left,
        kv_per_token=footprint.kv_per_token(stage),
        kv_per_sequence=sum(map(mul, block_bytes, longest)),
        num_blocks=first,
        groups=tuple(
            GroupBudget(
                name=group.name,
                num_layers=len(range(*group.layers_between(stage.start, stage.end))),
                block_bytes=nbytes,
                num_blocks=count,
                nbytes=count * nbytes,
            )
            for group, count, nbytes in zip(groups, num_blocks, block_bytes, strict=True)
        ),
    )


def adapter_bytes(footprint: Footprint, engine: EngineConfig, stage: Stage) -> int:
    """Returns the bytes a rank reserves for LoRA adapters."""
    if not (lora := engine.lora).enable_lora:
        return 0
    tokens = engine.scheduler.tokens
    return footprint.adapters(stage, lora.max_loras, lora.max_lora_rank, tokens)


# ---- verdict ----


def _problem(setup: NodeSetup, rank: RankBudget) -> str | None:
    """Returns why the node does not fit, None if it does."""
    usable, left = format_bytes(rank.usable), format_bytes(rank.left_for_kv)
    if rank.left_for_kv <= 0:
        needed = rank.weights + rank.activations + rank.overhead + rank.adapters
        others = "adapters, activations" if rank.adapters else "activations"
        return (
            f"weights of {format_bytes(rank.weights)}, with {others} and overhead "
            f"{format_bytes(needed)}, exceed the {usable} that are usable on one GPU"
        )
    if rank.loaded > rank.usable:
        return (
            f"weights of {format_bytes(rank.weights)}, with {format_bytes(rank.loading)} while "
            f"they are rounded and overhead {format_bytes(rank.loaded)}, exceed the {usable} that "
            "are usable on one GPU"
        )
    taken = sum(group.nbytes for group in rank.groups)
    if taken > rank.left_for_kv:
        return f"the KV cache of {format_bytes(taken)} exceeds the {left} that are left for it"
    blocks = blocks_per_sequence(setup.engine, setup.spec.kv_groups, setup.max_model_len)[0]
    if rank.num_blocks < blocks:
        given = setup.engine.cache.kv_cache_memory
        memory = f"{left} left for KV" if given is None else f"--kv-cache-memory {given}"
        return (
            f"{rank.num_blocks} blocks fit into {memory}, but one sequence of "
            f"{setup.max_model_len} tokens needs {blocks}"
        )
    return None


def _room(rank: RankBudget) -> str:
    weights, usable = format_bytes(rank.weights), format_bytes(rank.usable)
    left = format_bytes(rank.left_for_kv)
    return f"weights take {weights} of the {usable} usable on one GPU; {left} are left for KV"


def _fixes(setup: NodeSetup, rank: RankBudget) -> Iterator[str]:
    """Yields single changes that make it fit: the smallest per dimension, every quantization."""
    yield from _first(_more_tp(setup))
    yield from _first(_more_pp(setup))
    if (kind := setup.spec.quantization) is None or kind.scaled:
        yield from chain.from_iterable(_first([each]) for each in _quantized(setup))
    if setup.engine.cache.kv_cache_memory is not None:
        cache = replace(setup.engine.cache, kv_cache_memory=None)
        changed = replace(setup, engine=replace(setup.engine, cache=cache))
        yield from _first([("leave out --kv-cache-memory", changed)])
    if tokens := _num_tokens(setup, rank):
        yield from _first([(f"--max-model-len {tokens}", replace(setup, max_model_len=tokens))])


def _quantized(setup: NodeSetup) -> Iterator[tuple[str, NodeSetup]]:
    for name in QUANTIZATIONS:
        with suppress(ConfigError):
            yield f"--quantization {name}", replace(setup, spec=setup.spec.quantized(name))


def _first(changes: Iterable[tuple[str, NodeSetup]]) -> Iterator[str]:
    """Yields the first change, if any, with which the node fits."""
    yield from islice((text for text, setup in changes if _fits(setup)), 1)


def _fits(setup: NodeSetup) -> bool:
    try:
        setup.check()
    except ConfigError:
        return False
    return _problem(setup, tightest_rank(setup)) is None


def _more_tp(setup: NodeSetup) -> Iterator[tuple[str, NodeSetup]]:
    for size in _doubled(setup.tp):
        yield f"--tp {size}", _parallel(setup, tensor_parallel_size=size)


def _more_pp(setup: NodeSetup) -> Iterator[tuple[str, NodeSetup]]:
    for size in _doubled(setup.pp):
        changed = _parallel(setup, pipeline_parallel_size=size, pipeline_partition=None)
        yield f"--pp {size}", changed


def _parallel(setup: NodeSetup, **changes: Any) -> NodeSetup:
    parallel = replace(setup.engine.parallel, **changes)
    return replace(setup, engine=replace(setup.engine, parallel=parallel))


def _doubled(size: int) -> Iterator[int]:
    while (size := 2 * size) <= MAX_FIXED_SIZE:
        yield size
