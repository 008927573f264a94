"""What a rank's device can do at most, measured: products of matrices and reads of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Clock = Callable[[], float]  # seconds

# Sizes M = N = K: which one a library multiplies fastest differs with it and with the caches.
GEMM_SIZES = {"cpu": (768, 1024), "cuda": (4096, 8192)}
MIN_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    flops: float  # a second
    bandwidth: float  # bytes read a second


class PeakMeter:
    """Measures on `device`, with torch's threads as they are, when asked."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, read_bytes: int, clock: Clock | None = None
    ) -> None:
        """Memory is read in passes over `read_bytes`: as much as a step reads, so that what a
        cache holds of a small model counts as it does for the model."""
        self._clock = clock or device_clock(device)
        self._matrices = [
            (torch.ones(n, n, dtype=dtype, device=device), torch.ones(n, n, dtype=dtype).to(device))
            for n in GEMM_SIZES[device.type]
        ]
        numbers = max(read_bytes, MIN_READ_BYTES) // 4
        self._memory = torch.ones(numbers, dtype=torch.float32, device=device)

    def measure(self) -> Peaks:
        return Peaks(max(map(self._multiply, self._matrices)), self._read())

    def _multiply(self, matrices: tuple[torch.Tensor, torch.Tensor]) -> float:
        a, b = matrices
        seconds = self._seconds(lambda: F.linear(a, b))
        return 2.0 * len(a) ** 3 / seconds

    def _read(self) -> float:
        return self._memory.nbytes / self._seconds(self._memory.sum)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The better of two tries: others may be using the machine."""
        seconds = []
        for _ in range(2):
            started = self._clock()
            work()
            seconds.append(self._clock() - started)
        return min(seconds)


def device_clock(device: torch.device) -> Clock:
    """Wall time; of a GPU once it has done what it was told."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized
