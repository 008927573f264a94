"""Options of `pdserve bench step`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.config.compilation import CompilationConfig
from pdserve.common.config.engine import CacheConfig, ModelConfig, ParallelConfig
from pdserve.common.config.shared import option, same_option
from pdserve.common.config.speculation import MAX_DRAFTS
from pdserve.common.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStepConfig:
    """Steps

    Default without --batch, --context and --chunk: decode steps of 1, 8 and 32 sequences of 128
    tokens and of 32 sequences of 1,024 tokens, and a prefill chunk of 512 tokens.
    """

    batch: str | None = option(
        None, "sequences of a decode step (with --context)", metavar="N,N,..."
    )
    context: str | None = option(
        None,
        "tokens each sequence attends to, the newest included (with --batch)",
        metavar="N,N,...",
    )
    drafts: int = option(
        0,
        "draft tokens each sequence verifies per step (speculative decoding)",
        minimum=0,
        maximum=MAX_DRAFTS,
    )
    chunk: str | None = option(None, "tokens in a prefill chunk", metavar="N,N,...")
    repetitions: int = option(10, "measurements of each step", minimum=1)
    clock: str = option(
        "wall",
        "wall: wall-clock time; cpu: CPU time of the computing thread, for a machine that others "
        "use too (needs --threads 1)",
        choices=("wall", "cpu"),
    )
    statistic: str = option(
        "median",
        "how repetitions are combined: their median, or least: the best one, also of the peaks, "
        "for a machine that others use at times",
        choices=("median", "least"),
    )
    json: str | None = option(None, "also write the result to this file", metavar="FILE")
    baseline: str | None = option(
        None, "an earlier --json file to show speed-ups against", metavar="FILE"
    )
    tensor_parallel_size: int = same_option(
        ParallelConfig,
        "tensor_parallel_size",
        "ranks each layer is split over, one process each; figures are rank 0's",
    )
    threads: int = same_option(
        ParallelConfig,
        "cpu_threads",
        "torch threads per rank (0: the usable cores divided by the ranks)",
    )
    cpu_kernels: str = same_option(ParallelConfig, "cpu_kernels")
    enforce_eager: bool = same_option(CompilationConfig, "enforce_eager")
    device: str = same_option(ParallelConfig, "device")
    block_size: int = same_option(CacheConfig, "block_size")
    kv_cache_dtype: str = same_option(CacheConfig, "kv_cache_dtype")
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        if (self.batch is None) != (self.context is None):
            raise ConfigError("--batch and --context go together: give both or none")
        if self.clock == "cpu" and self.threads != 1:
            raise ConfigError("--clock cpu counts one thread: pass --threads 1")
