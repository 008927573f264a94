"""Weights of FP8 and INT8 checkpoints, which keep their 8 bits in a GPU's memory.

Activations are not rounded, so that the tokens are those of the dequantized model; a product
converts the numbers in registers (`kernels/gpu/products.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.stored_weights import STORED_FP8, numbers_of, scales_of
from pdserve.common.model.kernels.packed import Packed
from pdserve.common.model.kernels.quantized import Quantized
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, columns_of, rows_of

logger = logging.getLogger(__name__)


class ScaledWeight:
    """Numbers of 8 bits `[out, in]` times a float32 scale per output channel and group of inputs:
    e4m3 (arXiv:2209.05433) or int8. A checkpoint's scales per tensor or block are repeated."""

    def __init__(self, parts: Sequence[MatrixPart], sharding: Sharding) -> None:
        quantization, columns = sharding.quantization, columns_of(parts)
        assert quantization is not None, "the sharding has the format"
        self.parts, self._dtype, inputs = parts, sharding.dtype, parts[0].shape[1]
        self._groups = slice(*quantization.groups(columns.start, columns.stop, inputs))
        size, count = quantization.group_size or inputs, self._groups.stop - self._groups.start
        rows, own = rows_of(parts), columns.stop - columns.start
        is_fp8 = quantization.method == STORED_FP8
        self._numbers = torch.float8_e4m3fn if is_fp8 else torch.int8
        self.values = sharding.zeros(rows, own, dtype=torch.uint8)
        self.scales = sharding.zeros(count, rows, dtype=torch.float32)  # transposed
        self._quantized = Quantized(
            "e4m3" if is_fp8 else "int8",
            self.values if is_fp8 else self.values.view(torch.int8),
            self.scales,
            size if count > 1 else own,
            columns.start % size if count > 1 else 0,
        )
        products = sharding.kernels.products
        if products is not None and not products.takes(self._quantized):
            _warn_once()
            products = None
        self._products = products

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        product = None
        if self._products is not None:
            product = self._products.linear(x, self._quantized, bias)
        return F.linear(x, self.dense(), bias) if product is None else product

    def packed(self) -> Packed | None:
        return None

    def dense(self) -> Tensor:
        """Returns `[out, in]`: the exact product of number and scale, rounded to the dtype."""
        weight = self.values.view(self._numbers).to(self._dtype)  # exact
        size, first = self._quantized.size, self._quantized.first
        if first == 0 and weight.shape[1] % size == 0:
            weight.view(len(weight), -1, size).mul_(self.scales.t()[:, :, None])
            return weight
        for group, scales in enumerate(self.scales):
            begin, end = max(0, group * size - first), (group + 1) * size - first
            weight[:, begin:end].mul_(scales[:, None])
        return weight

    def shards(self) -> Iterator[Shard]:
        counts = [part.count for part in self.parts]
        targets = zip(self.values.split(counts), self.scales.split(counts, dim=1), strict=True)
        groups = -(-self.parts[0].shape[1] // self._quantized.size)
        for part, (values, scales) in zip(self.parts, targets, strict=True):
            name, shape = f"{part.name}.weight", (part.shape[0], groups)
            check = partial(_without_nan, name) if self._quantized.format == "e4m3" else _same
            kept = (part.rows, part.columns)
            yield Shard(numbers_of(name), part.shape, kept, values, check)
            yield Shard(scales_of(name), shape, (part.rows, self._groups), scales.t())


def _same(numbers: Tensor) -> Tensor:
    return numbers


def _without_nan(name: str, numbers: Tensor) -> Tensor:
    """Raises ConfigError for e4m3's NaN, which kernels would take for a number."""
    if ((numbers & 0x7F) == 0x7F).any():
        raise ConfigError(f"{name} has weights that are not numbers (NaN)")
    return numbers


@cache
def _warn_once() -> None:
    logger.warning(
        "some 8-bit matrices are dequantized for each product, which is slow: kernels for GPUs "
        "need blocks of a multiple of 16 inputs, which ranks cut at such multiples"
    )
