"""Measures the peak speeds of a rank's device: matrix products and memory reads."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pdserve.common.config.engine import MachineConfig
from pdserve.common.engine.messages import Peaks
from pdserve.common.model.kernels.ops import Kernels

Clock = Callable[[], float]  # seconds

# Sizes M = N = K; which is fastest depends on the library and the caches.
GEMM_SIZES = {"cpu": (768, 1024), "cuda": (4096, 8192)}
MIN_READ_BYTES, MAX_READ_BYTES = 1 << 20, 256 << 20
START_SECONDS = 0.3  # limit for matrix products at a node's start


class PeakMeter:
    """Measures `device` on demand, with torch's current number of threads."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        read_bytes: int,
        kernels: Kernels,
        clock: Clock | None = None,
    ) -> None:
        """`read_bytes`: size of a pass over memory. Use what a step reads, so that caches help a
        small model here as much as in a step. `kernels`: read it."""
        self._kernels = kernels
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
        return self._memory.nbytes / self._seconds(lambda: self._kernels.read(self._memory))

    def _seconds(self, work: Callable[[], object]) -> float:
        """Returns the better of two tries, because others may use the machine."""
        seconds = []
        for _ in range(2):
            started = self._clock()
            work()
            seconds.append(self._clock() - started)
        return min(seconds)


def peaks_of(
    config: MachineConfig,
    device: torch.device,
    dtype: torch.dtype,
    read_bytes: int,
    kernels: Kernels,
) -> Peaks:
    """Returns the peaks from the options; measures missing ones in about `START_SECONDS`."""
    flops, bandwidth = config.peak_tflops, config.peak_bandwidth
    return Peaks(
        _growing_products(device, dtype) if flops is None else flops * 1e12,
        _read_once(device, read_bytes, kernels) if bandwidth is None else bandwidth * 1e9,
    )


def _growing_products(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the best FLOP/s over products of growing size, up to a time limit: a CPU without
    instructions for the dtype may need seconds for what another one does in milliseconds."""
    clock, size, best, spent = device_clock(device), 256, 0.0, 0.0
    while spent < START_SECONDS / 16:  # the next one takes eight times as long
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        F.linear(a, b)  # the first call selects the kernel
        started = clock()
        F.linear(a, b)
        spent = clock() - started
        best = max(best, 2.0 * size**3 / spent)
        size *= 2
        if size > GEMM_SIZES[device.type][-1]:
            break
    return best


def _read_once(device: torch.device, read_bytes: int, kernels: Kernels) -> float:
    """Returns the bytes per second of the best of three passes."""
    numbers = min(max(read_bytes, MIN_READ_BYTES), MAX_READ_BYTES) // 4
    memory, clock = torch.ones(numbers, device=device), device_clock(device)
    seconds = []
    for _ in range(3):
        started = clock()
        kernels.read(memory)
        seconds.append(clock() - started)
    return memory.nbytes / min(seconds)


def device_clock(device: torch.device) -> Clock:
    """Returns a wall clock; on a GPU it waits for pending work first."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized
