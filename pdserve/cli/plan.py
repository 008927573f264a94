"""`pdserve plan`: computes the memory a model needs, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.topology import Topology, read_topology
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import PlanConfig
from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.planning.kv_budget import format_bytes, parse_bytes
from pdserve.common.planning.planned_model import PlannedModel
from pdserve.common.planning.role_plan import NodeSetup, RolePlan, plan_role
from pdserve.demo_model.embedded import resolve_model

CONFIG = "config.json"
ROLES = ("prefill", "decode")
FOOTNOTES = """\
¹ estimated peak of a step with --max-num-batched-tokens tokens and --max-num-seqs samples
² estimated: CUDA context, library workspaces and, with several GPUs, NCCL buffers"""
LOADING = "³ estimated peak while weights are rounded to int8, before there is a KV cache"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every role fits, else 1."""
    config = parse(
        PlanConfig,
        prog="pdserve plan",
        description="Compute the memory a model needs per GPU (weights, KV cache, activations) and "
        "how many sequences fit. Exit code 1: it does not fit. Activations and overhead are "
        "estimates; a node measures them when it starts.",
        argv=argv,
    )
    if config.model is None and not config.topology:
        raise ConfigError("--model must name a checkpoint folder, its config.json, or org/name")
    plans = [] if config.model is None else plan(_with_folder(config))
    topology = read_topology() if config.topology else None
    if config.json:
        print(json.dumps(as_json(config, plans, topology), indent=2))
    else:
        _show(console_of(), plans, topology)
    return 0 if all(plan.fits for plan in plans) else 1


def _with_folder(config: PlanConfig) -> PlanConfig:
    """Returns the config with the cache's folder in place of a GGUF file or a name on the Hub."""
    model = ModelConfig(
        model=config.model, revision=config.revision, download_dir=config.download_dir
    )
    return replace(config, model=resolve_model(model, weights=False).model)


def plan(config: PlanConfig) -> list[RolePlan]:
    """Returns one plan per role.

    Raises:
        ConfigError: the model is not supported, an option is missing, or a node would refuse
            these options whatever its memory.
    """
    model = _read_model(_model_config(config))
    setups = {role: setup(config, model.spec, role) for role in ROLES}
    return [
        plan_role(role, replace(each, weights_of=model.weights_of)) for role, each in setups.items()
    ]


def setup(config: PlanConfig, spec: ModelSpec, role: str) -> NodeSetup:
    """Returns the setup of a node of this role with the plan's options."""
    if config.gpu_memory is None:
        raise ConfigError("--gpu-memory must say how much memory a GPU has, e.g. 24GiB")
    own_tp, own_pp, own_ep = {
        "prefill": (config.prefill_tp, config.prefill_pp, config.prefill_ep),
        "decode": (config.decode_tp, config.decode_pp, config.decode_ep),
    }[role]
    return NodeSetup(
        spec=spec.quantized(config.quantization).on_gpus(),
        engine=_engine(
            config,
            ParallelConfig(
                tensor_parallel_size=own_tp or config.tensor_parallel_size,
                pipeline_parallel_size=own_pp or config.pipeline_parallel_size,
                pipeline_partition=config.pipeline_partition,
                expert_parallel_size=own_ep or config.expert_parallel_size,
            ),
        ),
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        gpu_memory=_gpu_memory(config),
    )


def _gpu_memory(config: PlanConfig) -> int:
    assert config.gpu_memory is not None, "setup asks for it"
    return parse_bytes(config.gpu_memory, "--gpu-memory")


def as_json(
    config: PlanConfig, plans: Sequence[RolePlan], topology: Topology | None
) -> dict[str, Any]:
    """Returns the plan as JSON data; sizes are in bytes."""
    found: dict[str, Any] = {}
    if plans:
        found = {"model": config.model, "roles": {plan.role: asdict(plan) for plan in plans}}
    if topology is not None:
        found["topology"] = asdict(topology)
    return found


def _engine(config: PlanConfig, parallel: ParallelConfig) -> EngineConfig:
    return EngineConfig(
        model=_model_config(config),
        parallel=parallel,
        cache=CacheConfig(
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory=config.kv_cache_memory,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ).on_gpu(int(_gpu_memory(config) * config.gpu_memory_utilization)),
        lora=LoRAConfig(
            enable_lora=config.enable_lora,
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
        ),
    )


def _model_config(config: PlanConfig) -> ModelConfig:
    return ModelConfig(
        model=config.model,
        model_impl=config.model_impl,
        dtype=config.dtype,
        hf_overrides=config.hf_overrides,
        rope_scaling=config.rope_scaling,
        rope_theta=config.rope_theta,
    )


def _read_model(config: ModelConfig) -> PlannedModel:
    path = Path(config.model or "")
    if path.is_file() and path.name != CONFIG:
        return PlannedModel(ModelSpec.from_file(path, config.overrides))
    folder = path.parent if path.is_file() else path
    return PlannedModel.from_folder(folder, config.model_impl, config.overrides)


# ---- tables ----


def _show(console: Console, plans: Sequence[RolePlan], topology: Topology | None) -> None:
    if plans:
        table = Table("", *(plan.role for plan in plans))
        columns = [dict(_rows(plan)) for plan in plans]
        for name in dict.fromkeys(chain(*sorted(columns, key=len, reverse=True))):
            table.add_row(name, *(column.get(name, "none") for column in columns))
        console.print(table)
        console.print(FOOTNOTES)
        if any(plan.rank.loading for plan in plans):
            console.print(LOADING)
    for plan in plans:
        console.print(_verdict(plan))
    if topology is not None:
        _show_topology(console, topology)


def _rows(plan: RolePlan) -> Iterator[tuple[str, str]]:
    """Yields (row name, value) of a role's column."""
    rank, tp, pp = plan.rank, plan.tensor_parallel_size, len(plan.pipeline_partition)
    experts = f", EP {plan.expert_parallel_size}" if plan.expert_parallel_size > 1 else ""
    yield "GPUs", f"{tp * pp} (TP {tp} × PP {pp}{experts})"
    yield "parameters", f"{plan.parameters / 1e9:.2f} B, {plan.dtype}"
    if plan.active_parameters < plan.parameters:
        yield "active parameters per token", f"{plan.active_parameters / 1e9:.2f} B"
    if plan.stored:
        yield "stored as", plan.stored
    if plan.quantization:
        yield f"parameters × {plan.quantization}", _gb(plan.parameter_bytes)
    yield "weights of the model", _gb(plan.weights)
    layers = " + ".join(map(str, plan.pipeline_partition))
    yield "layers", layers if pp == 1 else f"{layers} (below: stage {rank.stage + 1})"
    yield "usable memory per GPU", format_bytes(rank.usable)
    yield "− weights", _gb(rank.weights)
    yield "− activations ¹", format_bytes(rank.activations)
    yield "− overhead ²", format_bytes(rank.overhead)
    if rank.adapters:
        yield "− LoRA adapters", format_bytes(rank.adapters)
    yield "= left for KV", format_bytes(rank.left_for_kv)
    if rank.loading:
        yield "beside weights while loaded ³", format_bytes(rank.loading)
    if plan.num_tokens is None:
        yield "states of a sequence, GPU", format_bytes(rank.kv_per_sequence)
        yield "state blocks", f"{rank.num_blocks}, for {plan.max_sequences} sequences"
    else:
        yield "KV per token, model", format_bytes(plan.kv_per_token)
        yield "KV per token, GPU", format_bytes(rank.kv_per_token)
        yield "KV of longest sequence, GPU", format_bytes(rank.kv_per_sequence)
        yield "KV blocks", f"{rank.num_blocks} = {plan.num_tokens} tokens"
    for group in rank.groups if len(rank.groups) > 1 else ():
        blocks, layers = f"{group.num_blocks} blocks", f"{group.num_layers} layers"
        yield f"  {group.name}", f"{blocks} × {layers} = {format_bytes(group.nbytes)}"
    yield "longest sequences at once", str(plan.max_concurrent_sequences)
    yield "all-reduce per token", _traffic(plan, plan.all_reduce_per_token)
    step = f" ({plan.step_tokens} tokens)" if tp > 1 else ""
    yield "all-reduce per step", _traffic(plan, plan.all_reduce_per_step) + step


def _gb(count: int) -> str:
    """Returns both units: model sizes are given in GB, memory in GiB."""
    return f"{format_bytes(count)} = {count / 1e9:.2f} GB"


def _traffic(plan: RolePlan, count: int) -> str:
    return format_bytes(count) if plan.tensor_parallel_size > 1 else "none"


def _verdict(plan: RolePlan) -> Text:
    if plan.fits:
        return Text.assemble((f"{plan.role}: fits", "green"), f": {plan.reason}")
    fixes = (
        "; or ".join(plan.fixes) or "no single change is enough: combine some or use larger GPUs"
    )
    return Text.assemble((f"{plan.role}: does not fit", "red"), f": {plan.reason}\n  fix: {fixes}")


def _show_topology(console: Console, topology: Topology) -> None:
    for gpu in topology.gpus:
        console.print(f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.memory)}")
    for link in topology.links:
        console.print(f"GPU {link.gpus[0]} – GPU {link.gpus[1]}: {link.kind}")
    console.print(f"topology: {topology.advice}")
