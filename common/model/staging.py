"""Copies between host and device within a step. Only `fetch` and the end of `begin_fetch` make the
host wait for a GPU: other copies use pinned memory and are queued on the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Queues a copy of a host tensor to the device."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Like `upload`, for one-dimensional tensors of one dtype, in one copy."""
    if device.type == "cpu":
        return tuple(values)
    counts = [len(each) for each in values]
    packed = torch.empty(sum(counts), dtype=values[0].dtype, pin_memory=True)
    torch.cat(tuple(values), out=packed)
    return packed.to(device, non_blocking=True).split(counts)


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies `tensors`, all on one device, to the host, with one wait for all of them."""
    return begin_fetch(*tensors)()


def begin_fetch(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Queues copies of `tensors`, all on one device, to the host. Returns a callable that waits for
    them, but not for what is queued later, and returns them; any thread may call it."""
    device = tensors[0].device
    if device.type == "cpu":
        return lambda: tensors
    copies = tuple(
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        for each in tensors
    )
    landed = Mark(device)
    landed.set()

    def wait() -> tuple[Tensor, ...]:
        landed.wait()
        return copies

    return wait


class Mark:
    """A CUDA event on the current stream; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Records the event after all work queued so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Waits until the device has reached it; returns at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()


# ---- rows of a batch, without a wait for the device ----


def select_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns the given rows of `tensor`; `tensor` itself, without a copy, if these are all."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, indices(rows, tensor))


def indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Returns `rows` as int64 on the device of `like`."""
    return upload(torch.tensor(rows, dtype=torch.int64), like.device)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns `[len(values), 1]` with the dtype and device of `like`."""
    return upload(torch.tensor(values, dtype=like.dtype), like.device).unsqueeze(1)
