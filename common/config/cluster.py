"""Options of the commands for a whole cluster: `pdserve up` and `pdserve plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.kv_events import KVEventsOptions
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.node import TransferConfig
from pdserve.common.config.router import ChatConfig, RoutingConfig, ServerConfig
from pdserve.common.config.shared import (
    AuthConfig,
    LogConfig,
    ObservabilityConfig,
    TLSConfig,
    option,
    same_option,
)
from pdserve.common.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster

    Options of `pdserve up`, and of the roles it starts.
    """

    on: str = option(
        "host",
        "where processes run: host: all on this host; ray: each on one host of a Ray cluster "
        "with room for all its ranks (--ray-address)",
        choices=("host", "ray"),
    )
    prefill: int | None = option(
        None, "number of prefill nodes (default: 1, or 0 with --both)", minimum=0
    )
    decode: int | None = option(
        None, "number of decode nodes (default: 1, or 0 with --both)", minimum=0
    )
    both: int = option(
        0,
        "number of nodes that compute prompts and generate tokens in one process",
        minimum=0,
    )
    routers: int = option(
        1,
        "number of routers, each of which serves all nodes; the first uses the given ports, the "
        "others free ones",
        minimum=1,
    )
    prefill_tp: int | None = option(
        None, "ranks per stage of prefill nodes (default: --tensor-parallel-size)", minimum=1
    )
    decode_tp: int | None = option(
        None, "ranks per stage of decode nodes (default: --tensor-parallel-size)", minimum=1
    )
    prefill_pp: int | None = option(
        None, "stages of prefill nodes (default: --pipeline-parallel-size)", minimum=1
    )
    decode_pp: int | None = option(
        None, "stages of decode nodes (default: --pipeline-parallel-size)", minimum=1
    )
    restart: str = option(
        "on-failure",
        "when a process dies: on-failure: restart it (but not a drained node, or one with wrong "
        "options); no: stop the cluster",
        choices=("on-failure", "no"),
    )
    # `up` tells the nodes the router's ports, so free ports do, and two clusters fit on a host.
    server: ServerConfig = field(default_factory=lambda: ServerConfig(grpc_port=0, registry_port=0))
    chat: ChatConfig = field(default_factory=ChatConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    events: KVEventsOptions = field(default_factory=KVEventsOptions)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    log: LogConfig = field(default_factory=LogConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        nodes = self.nodes
        if bool(nodes["prefill"]) != bool(nodes["decode"]) or not any(nodes.values()):
            raise ConfigError(
                f"--prefill {nodes['prefill']}, --decode {nodes['decode']}, --both "
                f"{nodes['both']}: prefill and decode nodes need each other; start at least one of "
                "each, or one with --both"
            )
        if self.on == "ray":
            self._check_ray()

    def _check_ray(self) -> None:
        if self.engine.parallel.distributed_executor_backend == "ray":
            raise ConfigError(
                "--on ray places whole nodes, each on one host, so it does not go with "
                "--distributed-executor-backend ray: start a node over several hosts by itself"
            )
        if self.server.host != ServerConfig().host:
            raise ConfigError(
                "--on ray does not go with --host: each router listens at the address of its host"
            )

    @property
    def nodes(self) -> dict[str, int]:
        """The number of nodes per role, in starting order."""
        default = 0 if self.both else 1
        prefill = default if self.prefill is None else self.prefill
        decode = default if self.decode is None else self.decode
        return {"prefill": prefill, "decode": decode, "both": self.both}


def private_cluster(restart: str = "on-failure") -> ClusterConfig:
    """Returns the options of a cluster for one client, its owner: free ports, few log lines, and
    requests may wait for a day."""
    return ClusterConfig(
        restart=restart,
        server=ServerConfig(port=0, grpc_port=0, registry_port=0),
        routing=RoutingConfig(queue_timeout=86400.0, max_client_share=1.0),
        log=LogConfig(log_level="warning"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Plan

    The options of a node that decide what fits on its GPUs.
    """

    model: str | None = option(
        None,
        "folder of a Hugging Face checkpoint, its config.json, a GGUF file, or a name on the Hub "
        "(org/name), of which only what describes it is downloaded",
    )
    revision: str | None = same_option(ModelConfig, "revision")
    download_dir: str | None = same_option(ModelConfig, "download_dir")
    gpu_memory: str | None = option(None, "memory of one GPU, e.g. 24GiB")
    tensor_parallel_size: int = option(
        1, "ranks each stage is split over, in both roles", short="--tp", minimum=1
    )
    pipeline_parallel_size: int = option(
        1, "stages the layers are split into, in both roles", short="--pp", minimum=1
    )
    prefill_tp: int | None = option(None, "TP of prefill nodes (default: --tp)", minimum=1)
    decode_tp: int | None = option(None, "TP of decode nodes (default: --tp)", minimum=1)
    prefill_pp: int | None = option(None, "PP of prefill nodes (default: --pp)", minimum=1)
    decode_pp: int | None = option(None, "PP of decode nodes (default: --pp)", minimum=1)
    expert_parallel_size: int = option(
        1, "ranks per stage the experts are spread over, in both roles", short="--ep", minimum=1
    )
    prefill_ep: int | None = option(None, "EP of prefill nodes (default: --ep)", minimum=1)
    decode_ep: int | None = option(None, "EP of decode nodes (default: --ep)", minimum=1)
    pipeline_partition: str | None = same_option(ParallelConfig, "pipeline_partition")
    max_model_len: int | None = option(
        None, "context window in tokens (default: the model's)", minimum=1
    )
    hf_overrides: dict[str, Any] = same_option(ModelConfig, "hf_overrides")
    rope_scaling: dict[str, Any] = same_option(ModelConfig, "rope_scaling")
    rope_theta: float | None = same_option(ModelConfig, "rope_theta")
    model_impl: str = same_option(ModelConfig, "model_impl")
    dtype: str = same_option(ModelConfig, "dtype", "compute and KV dtype; auto: the checkpoint's")
    quantization: str | None = option(
        None,
        "weights of linear layers: int8, as nodes quantize them with this option; int4, an AWQ "
        "checkpoint with groups of 128 (default: as config.json says)",
        choices=("int8", "int4"),
    )
    gpu_memory_utilization: float = same_option(
        CacheConfig, "gpu_memory_utilization", "share of each GPU a node may use"
    )
    kv_cache_memory: str | None = option(
        None, "KV cache per rank, e.g. 2GiB (default: the rest of the GPU)"
    )
    block_size: int = same_option(CacheConfig, "block_size")
    kv_cache_dtype: str = same_option(CacheConfig, "kv_cache_dtype")
    max_num_seqs: int | None = same_option(SchedulerConfig, "max_num_seqs")
    max_num_batched_tokens: int | None = same_option(SchedulerConfig, "max_num_batched_tokens")
    enable_lora: bool = same_option(LoRAConfig, "enable_lora")
    max_loras: int = same_option(LoRAConfig, "max_loras")
    max_lora_rank: int = same_option(LoRAConfig, "max_lora_rank")
    json: bool = option(False, "print JSON, with sizes in bytes, instead of a table")
    topology: bool = option(
        False, "also show how this host's GPUs are connected, with advice (works without --model)"
    )
