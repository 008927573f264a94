"""Ranks of a small model on the CPU, whose extension stands for `kv_transfer`'s half of a rank."""

from __future__ import annotations

from typing import Any

from paths import MODELS
from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from pdserve.common.distributed.executor import Emit
from pdserve.common.worker.kv_cache import GroupCache
from pdserve.common.worker.worker import ExtensionConfig, WorkerConfig

MODEL = MODELS / "llama-gqa"
BLOCK_SIZE = 4


class EchoExtension:
    """Built like `kv_transfer`'s rank half; reports its arguments."""

    def __init__(
        self,
        caches: tuple[GroupCache, ...],
        shared_fd: int | None,
        rank: int,
        host: str,
        config: bytes,
        emit: Emit,
    ) -> None:
        assert all(each.tensor.shape[2] == each.shape.num_blocks for each in caches)
        assert shared_fd is not None
        self.cache = caches[0].tensor
        self.announced = b"%d %s" % (rank, config)

    def info(self) -> bytes:
        return self.announced

    def handle(self, message: bytes) -> bytes:
        """Returns whether the block of that number was written to."""
        return b"used" if self.cache[:, :, int(message)].any() else b"unused"

    def handle_at_once(self, message: bytes) -> bytes | None:
        return None

    def close(self, deadline: float) -> None:
        pass


def config(tensor_parallel_size: int = 1, **cache: Any) -> WorkerConfig:
    cache = {"num_gpu_blocks_override": 16, **cache}
    engine = EngineConfig(
        model=ModelConfig(model=str(MODEL), dtype="float32", max_model_len=48),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_parallel_size, cpu_threads=1, device="cpu"
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, **cache),
    )
    return WorkerConfig(engine, ExtensionConfig(f"{__name__}:EchoExtension", b"\x00\xff"))
