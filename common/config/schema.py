"""Every option of every role, written once. Flags, environment and YAML derive from these
classes (`common/config/sources.py`): a field `max_model_len` is the flag `--max-model-len`,
the variable `PDSERVE_MAX_MODEL_LEN` and the YAML key `max-model-len`.

Names follow vLLM where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.common.core.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text; `short`, `choices`, `metavar`, `minimum` and
    `maximum` (both inclusive) are optional. A `secret` never goes onto a command line."""
    if isinstance(default, (list, dict)):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata={"help": help, **extra})
    return field(default=default, metadata={"help": help, **extra})


PORT = {"minimum": 0, "maximum": 65535}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str | None = option(
        None, "folder of a Hugging Face checkpoint; absent: the embedded SmolLM2-135M-Instruct"
    )
    served_model_name: str | None = option(None, "name clients ask for (default: the folder's)")
    tokenizer: str | None = option(None, "folder of the tokenizer (default: the model's)")
    max_model_len: int | None = option(
        None, "context window in tokens (default: the model's)", minimum=1
    )
    load_format: str = option(
        "auto",
        "auto: safetensors; dummy: random weights from config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        "compute and KV dtype; auto: the checkpoint's, or float32 on CPUs without fast bf16",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "int8: keep the weights of linear layers in 8 bits, a scale per output channel; of an "
        "unquantized checkpoint (default: as the checkpoint is; AWQ and GPTQ need no option)",
        short="-q",
        choices=("int8",),
    )
    seed: int = option(0, "seed of dummy weights", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallelism"""

    tensor_parallel_size: int = option(1, "ranks each layer is split over", short="-tp", minimum=1)
    pipeline_parallel_size: int = option(
        1,
        "stages the layers are split into, each of --tensor-parallel-size ranks",
        short="-pp",
        minimum=1,
    )
    pipeline_partition: str | None = option(
        None,
        "layers of each stage, e.g. 9,8,8,5 (default: even, the first stages one more)",
        metavar="N,N,...",
    )
    expert_parallel_size: int = option(
        1,
        "ranks of a tensor-parallel group the experts are spread over (a mixture of experts); "
        "what is left of the group splits each expert",
        short="-ep",
        minimum=1,
    )
    all2all_backend: str = option(
        "replicated",
        "how tokens get to the ranks that hold their experts: replicated (tensor-parallel ranks "
        "have every token already: nothing moves), allgather_reducescatter, alltoallv, an entry "
        "point or module:Class",
    )
    data_parallel_size: int = option(
        1,
        "replicas of the model in a node, each with ranks, a scheduler and KV blocks of its own",
        short="-dp",
        minimum=1,
    )
    distributed_executor_backend: str = option(
        "auto",
        "how ranks run: mp: processes on this host; ray: actors of a Ray cluster, a stage on one "
        "host, stages on several; auto: one rank in the node's process, several as mp where this "
        "host has devices for them, else ray if a cluster answers",
        choices=("auto", "mp", "ray"),
    )
    ray_address: str | None = option(
        None,
        "head of the Ray cluster (default: RAY_ADDRESS, or the one this host is part of)",
        metavar="HOST:PORT",
    )
    cpu_threads: int = option(
        0,
        "torch threads per rank on a CPU (0: the cores that affinity and cgroup quotas leave this "
        "node, divided by its ranks)",
        minimum=0,
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    distributed_timeout: float = option(
        30.0, "seconds after which a silent rank is dead", minimum=0.1
    )
    device_communicator: str = option(
        "auto",
        "what carries tensors between the ranks of a node: shm, gloo, nccl, symm_mem, an entry "
        "point or module:Class; auto: nccl for CUDA, shm for CPU ranks of one host, else gloo",
    )

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        """Ranks of all replicas of a node."""
        return self.world_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache"""

    block_size: int = option(16, "tokens per KV block", minimum=1)
    gpu_memory_utilization: float = option(
        0.9, "share of each GPU this node may use", minimum=0.01, maximum=1.0
    )
    kv_cache_memory: str | None = option(
        None, "KV cache per rank, e.g. 2GiB (default: the rest of the GPU; on CPU a share of RAM)"
    )
    num_gpu_blocks_override: int | None = option(
        None, "number of KV blocks, instead of memory", minimum=1
    )
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling"""

    max_num_seqs: int = option(64, "sequences computed in one step", minimum=1)
    max_num_batched_tokens: int = option(512, "tokens computed in one step (chunk size)", minimum=1)
    engine_stall_timeout: float = option(
        20.0,
        "seconds a step or a rank's answer may take, or a queue stand still with nothing computed "
        "and no block freed, before the node says it is unhealthy (raise it where one step takes "
        "that long)",
        minimum=0.1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """KV transfer"""

    kv_connector: str = option(
        "auto",
        "what may carry KV, the preferred first, separated by commas: shm, tcp, cuda_ipc, nccl, an "
        "entry point or module:Class; auto: shm,tcp for CPU caches, cuda_ipc,nccl,tcp for CUDA",
    )
    kv_connector_config: dict[str, Any] = option(
        {}, 'the connector\'s own options, as JSON; for several or auto {"NAME": {...}}'
    )
    kv_host: str = option(
        "127.0.0.1",
        "address the KV data plane binds to and announces; auto: of each rank's own host, as other "
        "hosts reach it",
    )
    kv_lease: float = option(
        10.0,
        "seconds without progress after which KV blocks are freed",
        minimum=0.1,
        maximum=86_400.0,
    )
    enable_kv_digests: bool = option(
        True, "decode nodes check that KV landed as it was sent, before they use it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS between roles"""

    tls_cert: str | None = option(
        None,
        "certificate this role shows to the others (PEM, for servers and clients), naming the "
        "hosts under which it is dialled; with it all gRPC is mutual TLS",
        metavar="FILE",
    )
    tls_key: str | None = option(None, "private key of --tls-cert (PEM)", metavar="FILE")
    tls_ca: str | None = option(
        None, "CA that must have signed the other roles' certificates (PEM)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        given = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(given) and not all(given):
            raise ConfigError(
                "--tls-cert, --tls-key and --tls-ca go together: give all three or none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Trust between roles"""

    cluster_key: str | None = option(
        None,
        "secret that all roles of a cluster share and prove to know in every call (several with "
        "commas between: all are taken, the first is used); prefer the variable: other users of "
        "the host can see flags",
        metavar="KEY",
        secret=True,
    )
    insecure: bool = option(
        False,
        "let a role that other hosts reach start with neither --cluster-key nor --tls-*: whoever "
        "reaches it may read prompts and use the model",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Node"""

    router: str = option(
        "127.0.0.1:8002", "router's address to register at (--registry-port)", metavar="HOST:PORT"
    )
    host: str = option("127.0.0.1", "address to bind to")
    advertise_host: str | None = option(
        None,
        "address announced to the router (default: --host); auto: this host's name, which the "
        "others must be able to resolve, as containers on one network do",
    )
    grpc_port: int = option(0, "port of the node's gRPC server (0: a free one)", **PORT)
    metrics_port: int = option(0, "port of /metrics and /health (0: a free one)", **PORT)
    drain_timeout: float = option(30.0, "seconds a SIGTERM waits for work in flight", minimum=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP and gRPC front"""

    host: str = option("127.0.0.1", "address to bind to")
    port: int = option(8000, "HTTP port (0: a free one)", **PORT)
    grpc_port: int = option(8001, "gRPC port, for clients (0: a free one)", **PORT)
    registry_port: int = option(
        8002, "gRPC port at which nodes register; not for clients (0: a free one)", **PORT
    )
    trust_request_chat_template: bool = option(
        False, "accept `chat_template` in requests (Jinja can use much CPU)"
    )
    ports_file: str | None = option(
        None, "file to write the ports to once they are open, as JSON", metavar="FILE"
    )
    timeout_keep_alive: float = option(
        # Longer than clients keep theirs (aiohttp 15 s, httpx 5 s, balancers 60 s): who closes
        # first must be the one who would use it next, else a request meets a closed door.
        75.0,
        "seconds an HTTP connection may be idle before it is closed: longer than clients and load "
        "balancers keep theirs",
        minimum=0.1,
    )
    write_timeout: float = option(
        30.0,
        "seconds a client may take nothing of its answer before it is hung up on",
        minimum=0.1,
    )
    max_body_size: int = option(32 * 2**20, "bytes of one HTTP request", minimum=1)
    api_key: str | None = option(
        None,
        "key, or keys separated by commas, one of which clients must show as `Authorization: "
        "Bearer KEY`; prefer the variable: other users of the host can see flags",
        metavar="KEY",
        secret=True,
    )
    cache_salt_per_key: bool = option(
        False,
        "what one API key has asked is found in the prefix caches by that key alone, so that no "
        "other can tell by the time or by cached_tokens",
    )
    ssl_certfile: str | None = option(
        None, "certificate chain of the HTTP port (PEM); with it HTTP is HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "private key of --ssl-certfile (default: in the same file)", metavar="FILE"
    )
    drain_timeout: float = option(
        30.0, "seconds a SIGTERM waits for requests in flight", minimum=0.0
    )

    def __post_init__(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate it belongs to")
        if self.cache_salt_per_key and not self.api_key:
            raise ConfigError(
                "--cache-salt-per-key needs --api-key: there are no keys to tell apart"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Routing"""

    prefill_policy: str = option(
        "least-load", "placement of prefills", choices=("round-robin", "least-load")
    )
    decode_policy: str = option(
        "least-load", "placement of decodes", choices=("round-robin", "least-load")
    )
    local_prefill_threshold: int = option(
        0, "prompts of fewer tokens skip the prefill node (0: none do)", minimum=0
    )
    max_concurrent_requests: int = option(
        256, "choices (a request's n) that are computed at once", minimum=1
    )
    max_queued_requests: int = option(256, "requests waiting for a place; more get 429", minimum=0)
    max_client_share: float = option(
        0.75,
        "share of the places, of the queue and of the memory for bodies that one client (an API "
        "key, or without keys an address) may hold; 1 where all clients come through one proxy",
        minimum=0.01,
        maximum=1.0,
    )
    queue_timeout: float = option(
        30.0,
        "seconds a request waits in all, until its first token, for a place and for nodes; then "
        "503",
        minimum=0.0,
    )
    request_timeout: float = option(
        300.0,
        "seconds a request may go on without any progress, then 504; a request that has begun "
        "waits as long for a node that comes back (0: for ever)",
        minimum=0.0,
    )
    heartbeat_interval: float = option(1.0, "seconds between a node's heartbeats", minimum=0.05)
    heartbeat_timeout: float = option(
        5.0, "seconds of silence after which a node is not used", minimum=0.1
    )
    migration_limit: int = option(
        2,
        "how many nodes may die in a row while they compute a request, without a new token "
        "between them; one more, and it is poison and fails",
        minimum=0,
    )
    breaker_failures: int = option(
        3, "failures in a row that open a node's circuit breaker", minimum=1
    )
    breaker_cooldown: float = option(
        5.0, "seconds an open breaker waits before one trial", minimum=0.0
    )

    def __post_init__(self) -> None:
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout} must exceed "
                f"--heartbeat-interval {self.heartbeat_interval}: live nodes would look dead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging"""

    log_level: str = option(
        "info", "least level shown", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "text: one readable line; json: one object", choices=("text", "json")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a rank needs to compute: handed to worker processes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.cache.block_size < 1:
            raise ConfigError(f"--block-size {self.cache.block_size} must be at least 1")
        if self.parallel.tensor_parallel_size < 1:
            raise ConfigError("--tensor-parallel-size must be at least 1")
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.scheduler.max_num_batched_tokens} is less than "
                f"--max-num-seqs {self.scheduler.max_num_seqs}: a step could not give every "
                "running sequence one token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNodeConfig:
    """A prefill or decode node."""

    node: NodeConfig = field(default_factory=NodeConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router."""

    server: ServerConfig = field(default_factory=ServerConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster

    `pdserve up`: what differs from the roles' own options, and those options.
    """

    prefill: int = option(1, "prefill nodes", minimum=1)
    decode: int = option(1, "decode nodes", minimum=1)
    prefill_tp: int | None = option(
        None, "ranks of a stage of each prefill node (default: --tensor-parallel-size)", minimum=1
    )
    decode_tp: int | None = option(
        None, "ranks of a stage of each decode node (default: --tensor-parallel-size)", minimum=1
    )
    prefill_pp: int | None = option(
        None, "stages of each prefill node (default: --pipeline-parallel-size)", minimum=1
    )
    decode_pp: int | None = option(
        None, "stages of each decode node (default: --pipeline-parallel-size)", minimum=1
    )
    restart: str = option(
        "on-failure",
        "when a process of the cluster dies: on-failure: it is started again (a node that drained, "
        "or wrong options, never); no: the cluster stops",
        choices=("on-failure", "no"),
    )
    # Nodes learn the port from `up`, so that two clusters need not agree on ports.
    server: ServerConfig = field(default_factory=lambda: ServerConfig(grpc_port=0, registry_port=0))
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Plan

    `pdserve plan`: the options of a node that decide what fits on its GPUs, and what they are.
    """

    model: str | None = option(None, "folder of a Hugging Face checkpoint, or its config.json")
    gpu_memory: str | None = option(None, "memory of one GPU, e.g. 24GiB")
    tensor_parallel_size: int = option(
        1, "ranks each stage is split over, in both roles", short="--tp", minimum=1
    )
    pipeline_parallel_size: int = option(
        1, "stages the layers are split into, in both roles", short="--pp", minimum=1
    )
    prefill_tp: int | None = option(None, "of prefill nodes (default: --tp)", minimum=1)
    decode_tp: int | None = option(None, "of decode nodes (default: --tp)", minimum=1)
    prefill_pp: int | None = option(None, "of prefill nodes (default: --pp)", minimum=1)
    decode_pp: int | None = option(None, "of decode nodes (default: --pp)", minimum=1)
    expert_parallel_size: int = option(
        1, "ranks of a stage the experts are spread over, in both roles", short="--ep", minimum=1
    )
    prefill_ep: int | None = option(None, "of prefill nodes (default: --ep)", minimum=1)
    decode_ep: int | None = option(None, "of decode nodes (default: --ep)", minimum=1)
    pipeline_partition: str | None = option(
        None,
        "layers of each stage, e.g. 9,8,8,5 (default: even, the first stages one more)",
        metavar="N,N,...",
    )
    max_model_len: int | None = option(
        None, "context window in tokens (default: the model's)", minimum=1
    )
    dtype: str = option(
        "auto",
        "compute and KV dtype; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "weights of linear layers: int8, as nodes make them with this option; int4, an AWQ "
        "checkpoint with a scale and a zero point for 128 weights (default: as config.json says)",
        choices=("int8", "int4"),
    )
    gpu_memory_utilization: float = option(
        CacheConfig().gpu_memory_utilization,
        "share of each GPU a node may use",
        minimum=0.01,
        maximum=1.0,
    )
    kv_cache_memory: str | None = option(
        None, "KV cache per rank, e.g. 2GiB (default: the rest of the GPU)"
    )
    block_size: int = option(CacheConfig().block_size, "tokens per KV block", minimum=1)
    max_num_seqs: int = option(
        SchedulerConfig().max_num_seqs, "sequences computed in one step", minimum=1
    )
    max_num_batched_tokens: int = option(
        SchedulerConfig().max_num_batched_tokens,
        "tokens computed in one step (chunk size)",
        minimum=1,
    )
    json: bool = option(False, "print JSON, in bytes, instead of a table")
    topology: bool = option(
        False, "also read how this host's GPUs are connected and advise (alone: without --model)"
    )
