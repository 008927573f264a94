"""Options of `pdserve simulate` and `pdserve calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.config.engine import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.shared import option, same_option


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Simulation"""

    trace: str | None = option(
        None,
        "requests to replay: Mooncake's or your own .jsonl, .csv.gz as in benchmarks/traces, or "
        "Azure's .csv",
        metavar="FILE",
    )
    layout: str = option(
        "1P1D",
        "nodes: how many of which role (P, D, or B for both), and after @ how many times as fast "
        "as the calibration: 2P3D, 1P+1P@0.5+2D, 4B",
    )
    calibration: str | None = option(None, "what `pdserve calibrate` has measured", metavar="FILE")
    host_cores: int = option(
        0,
        "cores of the one host that all nodes are on: steps of more nodes than have cores slow "
        "each other down (0: every node has cores, or a GPU, of its own)",
        minimum=0,
    )
    seed: int = option(0, "what draws the durations that the calibration's scatter allows")
    requests: int = option(0, "most requests (0: all)", minimum=0)
    skip: int = option(0, "requests at the beginning of the trace to leave out", minimum=0)
    speed: float = option(1.0, "how many times as fast requests come", minimum=0.001)
    block_size: int = option(512, "tokens of a block of the trace's hash_ids", minimum=1)
    kv_cache_tokens: int = option(1_000_000, "tokens that the KV cache of a node holds", minimum=1)
    goodput_ttft: float = option(
        0.0, "seconds to the first token that count as good (0: as --slo-ttft)", minimum=0.0
    )
    goodput_itl: float = option(
        0.0,
        "mean seconds between an answer's tokens that count as good (0: as --slo-itl)",
        minimum=0.0,
    )
    json: str | None = option(None, "also write the figures to this file", metavar="FILE")
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Calibration"""

    output: str | None = option(None, "file to write", metavar="FILE")
    repetitions: int = option(3, "measurements of each point", minimum=1)
    batch: str = option("1,4,8", "sequences of decode steps", metavar="N,N,...")
    context: str = option("64,512", "tokens of their contexts", metavar="N,N,...")
    chunk: str = option("1,16,64,256", "prompt tokens that a step computes", metavar="N,N,...")
    cached: str = option("0,512", "cached tokens before them", metavar="N,N,...")
    cpu_threads: int = same_option(ParallelConfig, "cpu_threads")
    device: str = same_option(ParallelConfig, "device")
    kv_cache_dtype: str = same_option(CacheConfig, "kv_cache_dtype")
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
