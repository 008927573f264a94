"""Faults of KV: every way in which the bytes of a run of blocks can differ from those sent.

A fault changes a run in place. Its `data` has the shape [planes, blocks, bytes]; a plane is one
layer's keys, values or latents. `strange` has the same shape, with wrong content: earlier content
of the blocks, or the KV of other blocks, transfers and epochs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.kv_transfer.layout import CacheView, Rect

Data = NDArray[np.uint8]
Fault = Callable[[random.Random, Data, Data], None]


def flip_bit(rng: random.Random, data: Data, strange: Data) -> None:
    data.reshape(-1)[rng.randrange(data.size)] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, data: Data, strange: Data) -> None:
    """Restores the tail, as if it had not been written."""
    end = rng.randrange(data.size)
    data.reshape(-1)[end:] = strange.reshape(-1)[end:]


def keep_old_block(rng: random.Random, data: Data, strange: Data) -> None:
    block = rng.randrange(data.shape[1])
    data[:, block] = strange[:, block]


def replace_all(rng: random.Random, data: Data, strange: Data) -> None:
    """Replaces everything, as if the run had gone to other blocks."""
    data[:] = strange


def swap_planes(rng: random.Random, data: Data, strange: Data) -> None:
    """Swaps keys and values, or two layers."""
    one, other = rng.sample(range(data.shape[0]), 2)
    data[[one, other]] = data[[other, one]]


def swap_blocks(rng: random.Random, data: Data, strange: Data) -> None:
    one, other = rng.sample(range(data.shape[1]), 2)
    data[:, [one, other]] = data[:, [other, one]]


def duplicate_block(rng: random.Random, data: Data, strange: Data) -> None:
    one, other = rng.sample(range(data.shape[1]), 2)
    data[:, one] = data[:, other]


OF_ANY_RUN: Sequence[Fault] = (flip_bit, truncate, keep_old_block, replace_all, swap_planes)
FAULTS: Sequence[Fault] = (*OF_ANY_RUN, swap_blocks, duplicate_block)


def spoil(rng: random.Random, data: Data, strange: Data) -> Fault:
    """Applies a fault that changes the data; returns it."""
    right = data.copy()
    while True:
        fault = rng.choice(FAULTS if data.shape[1] > 1 else OF_ANY_RUN)
        fault(rng, data, strange)
        if not np.array_equal(data, right):
            return fault


class Place:
    """The blocks of a rect in a rank's CPU cache."""

    def __init__(self, view: CacheView, rect: Rect, block_ids: Sequence[int]) -> None:
        whole, cache = view.rect, view.cache.view(torch.uint8)
        layers = slice(rect.layer_start - whole.layer_start, rect.layer_end - whole.layer_start)
        heads = slice(rect.head_start - whole.head_start, rect.head_end - whole.head_start)
        self._memory: NDArray[Any] = cache.flatten(4).numpy()[layers, :, :, heads]
        self._ids = np.asarray(block_ids)

    def read(self) -> Data:
        """Returns a copy, [planes, blocks, bytes]."""
        taken = self._memory[:, :, self._ids]
        layers, planes = taken.shape[:2]
        return np.ascontiguousarray(taken).reshape(layers * planes, len(self._ids), -1)

    def write(self, data: Data) -> None:
        layers, planes, _, heads, nbytes = self._memory.shape
        self._memory[:, :, self._ids] = data.reshape(layers, planes, len(self._ids), heads, nbytes)
