"""Checks the results of a group's collectives and measures their speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.common.core.errors import NodeError
from pdserve.common.distributed.group import GroupCoordinator

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_CALIBRATION = 3  # calls to estimate how many to time
_MOST_CALLS = 1000
_LOST = "[RANK_LOST"


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one collective with one dtype, on one rank. `error` is empty if it passed."""

    group: str
    operation: str
    dtype: str
    rank: int  # in the world
    error: str


@dataclass(frozen=True, slots=True)
class Figure:
    """The speed of one operation. `nbytes`: each rank's input; GB/s is that divided by the latency,
    without a factor for the algorithm's traffic."""

    group: str
    operation: str
    nbytes: int
    latency_us: float  # median of one call, on the group's first rank
    gb_per_s: float


# ---- checks ----


def verify(group: GroupCoordinator) -> list[Check]:
    """Checks every collective with every dtype, a non-contiguous tensor and an empty one.
    All ranks must call it. It stops after a lost rank."""
    checks = []
    for dtype in DTYPES:
        for operation, error in _verify(group, dtype):
            name = str(dtype).removeprefix("torch.")
            checks.append(Check(group.name, operation, name, group.ranks[group.rank], error))
            if error.startswith(_LOST):
                return checks
    return checks


def _verify(group: GroupCoordinator, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    size, rank = group.size, group.rank
    whole = [_sample(peer, size, dtype, group.device) for peer in range(size)]
    mine, total = whole[rank], _total(whole)
    joined, share = torch.cat(whole, 1), total.shape[1] // size
    nothing = mine[:0]
    after, before = (rank + 1) % size, (rank - 1) % size
    counts = [(rank + peer) % 3 for peer in range(size)]  # rows, symmetric: sent and received
    arriving = torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])

    def all_to_all() -> Tensor:
        rows = torch.cat([mine[:count] for count in counts])
        return group.all_to_all(rows[:, ::2], counts, counts)

    def send_recv() -> Tensor:
        if rank % 2 == 0:  # in a ring of odd size the last rank, rank 0's neighbour, is even too
            group.send(mine, after)
            return group.recv(mine.shape, dtype, before)
        received = group.recv(mine.shape, dtype, before)
        group.send(mine, after)
        return received

    cases: list[tuple[str, Callable[[], Tensor], Tensor]] = [
        ("all_reduce", lambda: group.all_reduce(mine.clone()), total),
        ("all_gather", lambda: group.all_gather(mine, 1), joined),
        (
            "reduce_scatter",
            lambda: group.reduce_scatter(mine, 1),
            total[:, rank * share : (rank + 1) * share],
        ),
        ("all_to_all", all_to_all, arriving[:, ::2]),
        ("broadcast", lambda: group.broadcast(mine.clone(), size - 1), whole[-1]),
        ("send, recv", send_recv, whole[before]),
        ("empty", lambda: group.all_gather(group.all_reduce(nothing), 0), nothing),
    ]
    for name, run, expected in cases:
        yield name, _compare(run, expected)


def _sample(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `[3, 4 * size]`, non-contiguous, with small integers whose sums fit every dtype."""
    numbers = torch.arange(24 * size, device=device).view(3, 8 * size) + 3 * rank
    return (numbers % 7 % (2 if dtype is torch.bool else 7)).to(dtype)[:, ::2]


def _total(parts: list[Tensor]) -> Tensor:
    wide = torch.stack([part.to(torch.float64) for part in parts]).sum(0)
    return wide.to(parts[0].dtype)


def _compare(run: Callable[[], Tensor], expected: Tensor) -> str:
    try:
        result = run()
    except NodeError as error:
        return str(error)
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"the result is {_shape(result)}, not {_shape(expected)}"
    wrong = int((result != expected).sum())
    return f"{wrong} of {expected.numel()} elements are wrong" if wrong else ""


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---- speed ----


def _ping_pong(group: GroupCoordinator, tensor: Tensor) -> None:
    """Sends from the first rank to the second and back."""
    if group.rank == 0:
        group.send(tensor, 1)
    if group.rank < 2:
        group.recv(tensor.shape, tensor.dtype, 1 - group.rank)
    if group.rank == 1:
        group.send(tensor, 0)


def _equal_shares(group: GroupCoordinator, tensor: Tensor) -> tuple[list[int], list[int]]:
    """Returns equal (sends, receives) for all ranks."""
    shares = [len(tensor) // group.size] * group.size
    return shares, shares


OPERATIONS: dict[str, Callable[[GroupCoordinator, Tensor], object]] = {
    "all_reduce": GroupCoordinator.all_reduce,
    "all_gather": lambda group, tensor: group.all_gather(tensor, 0),
    "reduce_scatter": lambda group, tensor: group.reduce_scatter(tensor, 0),
    "all_to_all": lambda group, tensor: group.all_to_all(tensor, *_equal_shares(group, tensor)),
    "broadcast": GroupCoordinator.broadcast,
    "send, recv": _ping_pong,
}


def measure(group: GroupCoordinator, operation: str, nbytes: int, seconds: float) -> Figure:
    """Times `operation` on float32 tensors of `nbytes` (at least one element per rank) for about
    `seconds`. All ranks must call it; use the first rank's figure."""
    count = max(nbytes // 4 // group.size, 1) * group.size
    tensor = torch.zeros(count, device=group.device)
    call, trips = OPERATIONS[operation], 2 if operation == "send, recv" else 1
    latency = time_calls(group, lambda: call(group, tensor), seconds) / trips
    return Figure(
        group.name, operation, tensor.nbytes, latency * 1e6, tensor.nbytes / latency / 1e9
    )


def time_calls(group: GroupCoordinator, call: Callable[[], object], seconds: float) -> float:
    """Returns the median seconds of one call, which all ranks make together."""
    trial = statistics.median(_times(group, call, _CALIBRATION))
    calls = torch.tensor([min(max(int(seconds / trial), _CALIBRATION), _MOST_CALLS)])
    return statistics.median(_times(group, call, int(group.broadcast(calls, 0))))


def _times(group: GroupCoordinator, call: Callable[[], object], count: int) -> list[float]:
    group.barrier()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        times.append(time.perf_counter() - started)
    return times
