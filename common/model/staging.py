"""What crosses between host and device in a step. The host waits for a GPU in `fetch` alone: memory
it copies from and to is pinned, and a copy queues up behind what was queued before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """What is on the host, on the device when its stream comes to that."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """`upload` of tensors of one dtype and one dimension, in one copy."""
    if device.type == "cpu":
        return tuple(values)
    counts = [len(each) for each in values]
    packed = torch.empty(sum(counts), dtype=values[0].dtype, pin_memory=True)
    torch.cat(tuple(values), out=packed)
    return packed.to(device, non_blocking=True).split(counts)


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, all of one device, on the host: one wait for all of them."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors
    copies = tuple(
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        for each in tensors
    )
    landed = Mark(device)
    landed.set()
    landed.wait()
    return copies


class Mark:
    """A place in what is queued on the device. A CPU has no queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Behind all that the device was given."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until the device has come to it; at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()
