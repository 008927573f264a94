"""A matrix of weights in memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.kernels.ops import Kernels


class WeightMatrix:
    """`[out, in]`, row by row while it is loaded. Then, where the kernels know how, packed in its
    place, in the order in which they multiply it best; elsewhere it stays as it is, and torch
    multiplies it."""

    def __init__(self, tensor: Tensor, kernels: Kernels) -> None:
        self.tensor = tensor
        """The memory; in the order of `dense()` only until it is packed."""
        self._packer = kernels.packer
        self.packed = False

    def pack(self) -> None:
        """Once it is loaded, and once for all."""
        if not self.packed and self._packer is not None and self._packer.takes(self.tensor):
            self._packer.pack(self.tensor)
            self.packed = True

    def dense(self) -> Tensor:
        """`[out, in]`, not to be written to; of a packed one a copy."""
        if not self.packed or self._packer is None:
            return self.tensor
        return self._packer.unpack(self.tensor)

    def rows(self, ids: Tensor) -> Tensor:
        """int64 `[T]` → `[T, in]`. Raises IndexError."""
        if not self.packed or self._packer is None:
            return F.embedding(ids, self.tensor)
        return self._packer.unpack(self.tensor, ids)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[T, in] → [T, out]`; `x` in the matrix's dtype."""
        if not self.packed or self._packer is None:
            return F.linear(x, self.tensor, bias)
        return self._packer.linear(x, self.tensor, bias)

    def scaled_linear(self, x: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor | None:
        """Of an int8 matrix, whose rows `scales` belong to; None if it is better turned into the
        dtype of `x`."""
        if not self.packed or self._packer is None or not self._packer.wins(len(x), x.dtype):
            return None
        return self._packer.linear(x, self.tensor, bias, scales)
