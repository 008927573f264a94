"""Options of the model and the engine that computes it, which nodes pass to their ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdserve.common.config.compilation import CompilationConfig
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.shared import option
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.checkpoint_config import overridden
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import KV_AUTO, KV_CACHE_DTYPES
from pdserve.common.core.parameters import MAX_LOGPROBS
from pdserve.common.core.stored_weights import STORED_NAMES

CPU_SEQS, CPU_TOKENS = 64, 512
GPU_SEQS, GPU_TOKENS, LARGE_GPU_TOKENS = 256, 2048, 8192
LARGE_GPU_BYTES = 32 * 2**30  # of a node's part
AUTO = -1  # --max-model-len auto


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str | None = option(
        None,
        "folder of a Hugging Face checkpoint, a GGUF file, or a name on the Hub (org/name) "
        "(default: the embedded SmolLM2-135M-Instruct)",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model by name (default: main)", metavar="TEXT"
    )
    download_dir: str | None = option(
        None,
        "cache for models by name (default: HF_HUB_CACHE, else huggingface_hub's own)",
        metavar="FOLDER",
    )
    served_model_name: list[str] = option(
        [],
        "model names clients may use; answers have the first one (default: the folder's or the "
        "GGUF file's name, or the name on the Hub)",
        metavar="NAME",
    )
    tokenizer: str | None = option(None, "folder of the tokenizer (default: the model's)")
    tokenizer_mode: str = option(
        "auto",
        "which of a folder's tokenizers: hf (tokenizer.json, else tokenizer.model), mistral "
        "(tekken.json), or auto (tokenizer.json, else tekken.json, else tokenizer.model)",
        choices=("auto", "hf", "mistral"),
    )
    max_model_len: int | None = option(
        None,
        "context window in tokens; auto or -1: the longest that fits one sequence into a node's "
        "KV cache (default: the model's)",
        metavar="{N,auto}",
        minimum=AUTO,
        aliases={"auto": AUTO},
    )
    hf_overrides: dict[str, Any] = option(
        {},
        "changes to config.json, as JSON that is merged into it before anything reads it: "
        '{"max_position_embeddings": 65536}',
    )
    rope_scaling: dict[str, Any] = option(
        {},
        "rotary scaling, as JSON that is merged into config.json's: "
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}',
    )
    rope_theta: float | None = option(None, "rotary base (default: config.json's)", minimum=1.0)
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "highest number of logprobs per token that a request may ask for",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    model_impl: str = option(
        "auto",
        "which code computes the model: native, transformers (any decoder that uses its attention "
        "interface), or auto: native where it is supported",
        choices=("auto", "native", "transformers"),
        aliases={"vllm": "native"},
    )
    load_format: str = option(
        "auto",
        "auto: safetensors or GGUF; dummy: random weights, from config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    load_broadcast: bool = option(
        False,
        "the first rank with the model's folder on its host reads it and sends it to the node's "
        "other ranks; their hosts do not need the folder",
    )
    dtype: str = option(
        "auto",
        "compute and KV dtype; auto: the checkpoint's, or float32 on CPUs without fast bf16",
        choices=("auto", "float32", "bfloat16", "float16"),
        aliases={"half": "float16", "float": "float32"},
    )
    quantization: str | None = option(
        None,
        "int8: quantize the linear layers and the head of an unquantized checkpoint to 8 bits, "
        "with a scale per output channel; another name: what the checkpoint's config.json must say "
        "(default: as the checkpoint is)",
        short="-q",
        choices=("int8", *STORED_NAMES),
    )
    seed: int = option(0, "seed of dummy weights", minimum=0)
    chat_template: str | None = option(
        None,
        "file of a Jinja template, or the template itself (default: the tokenizer's)",
        metavar="FILE",
    )
    generation_config: str = option(
        "auto",
        "source of default sampling parameters: auto: the model's generation_config.json if it "
        "exists; vllm: OpenAI's defaults; or a folder with another generation_config.json",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        if self.max_model_len == 0:
            raise ConfigError("--max-model-len 0: give at least 1 token, or auto")
        if "eos_token_id" in self.hf_overrides:
            raise ConfigError(
                "--hf-overrides: eos_token_id is the tokenizer's too and stays; send "
                "stop_token_ids with the request"
            )

    @property
    def overrides(self) -> dict[str, Any]:
        """The changes to config.json by all options; the short forms win over --hf-overrides."""
        rope = {"rope_scaling": self.rope_scaling, "rope_theta": self.rope_theta}
        return overridden(self.hf_overrides, {key: value for key, value in rope.items() if value})

    def context(self, models: int) -> int:
        """Returns the context window in tokens of a model whose own is `models`; with auto the
        upper limit."""
        given = self.max_model_len
        return models if given is None or given == AUTO else given

    @property
    def served_name(self) -> str:
        """The model's name in answers, which roles also compare when nodes register."""
        return (*self.served_model_name, Path(self.model or "").resolve().name)[0]


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
        "layers per stage, e.g. 9,8,8,5 (default: even; the first stages get the remainder)",
        metavar="N,N,...",
    )
    expert_parallel_size: int = option(
        1,
        "ranks of a tensor-parallel group that the experts of an MoE model are spread over; a "
        "group of tp / ep ranks splits each expert",
        short="-ep",
        minimum=1,
    )
    all2all_backend: str = option(
        "replicated",
        "how tokens reach the ranks of their experts; replicated: tensor-parallel ranks have every "
        "token already, so nothing moves; also an entry point or module:Class",
        known=("replicated", "allgather_reducescatter", "alltoallv"),
    )
    data_parallel_size: int = option(
        1,
        "replicas of the model in a node, each with its own ranks, scheduler and KV blocks",
        short="-dp",
        minimum=1,
    )
    distributed_executor_backend: str = option(
        "auto",
        "how ranks run: mp: processes on this host; ray: actors of a Ray cluster, each stage on "
        "one host, or on several if none has room; auto: a single rank in the node's process, "
        "several as mp if this host has enough devices, else as ray if a cluster answers",
        choices=("auto", "mp", "ray"),
    )
    ray_address: str | None = option(
        None,
        "head of the Ray cluster (default: RAY_ADDRESS, else the cluster this host belongs to)",
        metavar="HOST:PORT",
    )
    cpu_threads: int = option(
        0,
        "torch threads per rank on a CPU (0: the cores that affinity and cgroup quotas allow, "
        "divided by the ranks)",
        minimum=0,
    )
    cpu_kernels: str = option(
        "auto",
        "kernels on a CPU; native: C++ compiled for this machine at first use (needs g++); torch: "
        "torch operators, which are slower, on a GPU too; auto: C++, prebuilt or compiled, if "
        "there is either, on a GPU Triton's",
        choices=("auto", "native", "torch"),
    )
    share_cores: str | None = option(
        None,
        "file through which CPU ranks of a host lend each other idle cores; created if missing; "
        "off: none (default: pdserve up makes one for its nodes; none for a node that is started "
        "alone)",
        metavar="FILE",
    )
    host_nodes: int = option(
        1,
        "nodes of this host, which share its memory if they compute on its CPUs (pdserve up counts "
        "its own)",
        minimum=1,
    )
    device: str = option("auto", "device to compute on", choices=("auto", "cpu", "cuda"))
    distributed_timeout: float = option(
        30.0, "seconds without a sign of life after which a rank counts as dead", minimum=0.1
    )
    device_communicator: str = option(
        "auto",
        "transport of tensors between a node's ranks; also an entry point or module:Class; auto: "
        "nccl for CUDA, shm for CPU ranks on one host, hierarchical for several hosts of which one "
        "has several ranks, else gloo",
        known=("auto", "shm", "hierarchical", "gloo", "nccl", "symm_mem"),
    )

    @property
    def world_size(self) -> int:
        """The number of ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        """The number of ranks of all replicas of a node."""
        return self.world_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache"""

    block_size: int = option(16, "tokens per KV block", minimum=1)
    gpu_memory_utilization: float = option(
        0.9, "share of each GPU this node may use", minimum=0.01, maximum=1.0
    )
    kv_cache_memory: str | None = option(
        None,
        "KV cache per rank, e.g. 2GiB (default: the rest of the GPU; on a CPU a share of RAM)",
        short="--kv-cache-memory-bytes",
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "number of KV blocks, instead of a size in bytes; if windows differ by layer, of the "
        "first KV group; the other groups follow",
        minimum=1,
    )
    kv_cache_dtype: str = option(
        KV_AUTO,
        "dtype of cached and transferred KV; auto: the dtype of computation; fp8_e4m3, int8: 8 "
        "bits with a scale per token and head, on CPUs; prefill and decode nodes need the same "
        "value",
        choices=KV_CACHE_DTYPES,
        aliases={"fp8": "fp8_e4m3"},
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling"""

    max_num_seqs: int | None = option(
        None, f"most sequences in one step (default: {CPU_SEQS}; on a GPU {GPU_SEQS})", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        f"most tokens in one step (chunk size) (default: {CPU_TOKENS}; on a GPU {GPU_TOKENS}, or "
        f"{LARGE_GPU_TOKENS} if the node may use 32 GiB of it)",
        minimum=1,
    )
    async_scheduling: bool = option(
        False,
        "send step n + 1 to the ranks while they compute step n, whose tokens they use by "
        "themselves: no gap between steps, and one unused token at the end of most sequences; "
        "needs one pipeline stage and no --speculative-config",
    )
    engine_stall_timeout: float = option(
        20.0,
        "seconds after which the node reports itself unhealthy: without an answer to a step, or "
        "with a queue while nothing is computed and no block is freed (raise it if one step takes "
        "that long)",
        minimum=0.1,
    )

    @property
    def seqs(self) -> int:
        """Most sequences in one step."""
        return self.max_num_seqs or min(CPU_SEQS, self.max_num_batched_tokens or CPU_SEQS)

    @property
    def tokens(self) -> int:
        """Most tokens in one step."""
        return self.max_num_batched_tokens or max(CPU_TOKENS, self.seqs)

    def on_gpu(self, usable: int) -> SchedulerConfig:
        """Fills in the defaults for a GPU of which a node may use `usable` bytes. Larger steps use
        its arithmetic better, and their activations take memory from KV."""
        seqs = self.max_num_seqs or GPU_SEQS
        tokens = LARGE_GPU_TOKENS if usable >= LARGE_GPU_BYTES else GPU_TOKENS
        tokens = self.max_num_batched_tokens or max(tokens, seqs)
        if self.max_num_seqs is None:
            seqs = min(seqs, tokens)
        return replace(self, max_num_seqs=seqs, max_num_batched_tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """Peak speed of a rank"""

    peak_tflops: float | None = option(
        None,
        "speed of large matrix products in 10¹² FLOP/s, the 100 % of pdserve_mfu (default: "
        "measured at start, which needs an otherwise idle machine)",
        minimum=0.001,
    )
    peak_bandwidth: float | None = option(
        None,
        "memory read bandwidth in 10⁹ bytes/s, the 100 % of pdserve_bandwidth_utilisation "
        "(default: measured at start)",
        minimum=0.001,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options that a rank needs to compute; worker processes get them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the decode steps that a GPU captures as CUDA graphs."""
        return self.compilation.graph_sizes(self.scheduler.seqs)

    def __post_init__(self) -> None:
        seqs, tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        self.compilation.graph_sizes(seqs or GPU_SEQS)  # raises ConfigError if wrong
        if self.model.load_broadcast and self.lora.enable_lora:
            raise ConfigError(
                "--load-broadcast does not send adapters, which --enable-lora reads on every host: "
                "leave out one of the two"
            )
        if tokens is not None and tokens < (seqs or 0):
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: a step "
                "could not compute one token of every running sequence"
            )
        if self.scheduler.async_scheduling:
            self._check_async()

    def _check_async(self) -> None:
        if self.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                "--async-scheduling needs --pipeline-parallel-size 1: stages already compute "
                "several steps at once, and the first one does not have the last one's tokens"
            )
        if self.speculation.speculation is not None:
            raise ConfigError(
                "--async-scheduling needs the tokens of a step to be one for each sequence: leave "
                "out --speculative-config, which drafts several, or --async-scheduling"
            )

    @property
    def max_num_rows(self) -> int:
        """Most rows of logits in a step: one per sequence, and one per draft token."""
        speculation, scheduler = self.speculation.speculation, self.scheduler
        drafts = speculation.num_speculative_tokens if speculation else 0
        return min(scheduler.seqs * (1 + drafts), scheduler.tokens)

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens of the steps that ranks have at a time."""
        steps = 2 if self.scheduler.async_scheduling else self.parallel.pipeline_parallel_size
        return self.scheduler.tokens * steps
