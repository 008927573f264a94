"""Staging: device memory between a cache and a transport that needs contiguous bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.layout import Rect

FRAME_NBYTES = 16 << 20  # of a frame's payload at most, unless one block is larger
PART_NBYTES = 64 << 20  # of one staging tensor; both ends of a pair must cut runs alike


def parts(cache: torch.Tensor, rect: Rect, count: int, nbytes: int = 0) -> Iterator[slice]:
    """Cuts `count` blocks of a piece into parts of at most `nbytes`, or else `PART_NBYTES` (one
    block at least)."""
    step = max(1, (nbytes or PART_NBYTES) // piece_nbytes(cache, rect, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class OwnStream:
    """Is the CUDA stream of a connection, beside the model's. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes work queued in the body start after the model's steps queued so far. It is needed
        because a rank that does not sample answers before the device has computed its blocks."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            yield

    def synchronize(self) -> None:
        """Returns when the device has done all work queued here."""
        if self._stream is not None:
            self._stream.synchronize()
