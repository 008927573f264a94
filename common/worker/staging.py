"""What crosses between host and device in a step. The host waits for a GPU in `fetch` alone: memory
it copies from and to is pinned, and a copy queues up behind what was queued before it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """What is on the host, on the device when its stream comes to that."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, all of one device, on the host: one wait for all of them."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors
    copies = tuple(
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        for each in tensors
    )
    landed = torch.cuda.Event()
    landed.record(torch.cuda.current_stream(device))
    landed.synchronize()
    return copies
