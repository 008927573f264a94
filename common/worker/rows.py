"""Rows of a batch's tensors, without a wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.common.model.staging import upload


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Those rows; all of them without a copy."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, indices(rows, tensor))


def indices(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), like.device)


def column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """`[len(values), 1]`, of the dtype and device of `like`."""
    return upload(torch.tensor(values, dtype=like.dtype), like.device).unsqueeze(1)
