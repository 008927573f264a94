"""Packs and unpacks 4- and 8-bit weights: 32-bit words in AWQ, GPTQ and compressed-tensors files,
two per byte in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.sharding import Shard

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ's position in a word of each of eight outputs


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The format of a packed matrix in a file, with words along one dimension: `[in, out]`, or
    `[out, in]` if not `transposed`."""

    name: str  # the last part of the tensor's name
    bits: int
    dim: int  # the dimension that words pack
    order: tuple[int, ...]  # position of each number in a word, from the low bits
    transposed: bool = True

    @classmethod
    def of(cls, method: str, bits: int) -> PackedMatrix:
        """Returns the format of weights in "awq", "gptq" or "compressed-tensors" files."""
        in_order = tuple(range(WORD_BITS // bits))
        if method == "compressed-tensors":
            return cls("weight_packed", bits, 1, in_order, transposed=False)
        if method == "awq":
            return cls("qweight", bits, 1, AWQ_ORDER)
        return cls("qweight", bits, 0, in_order)

    def of_zeros(self) -> PackedMatrix:
        """Returns the format of zero points, which all methods pack along outputs."""
        if not self.transposed:
            return replace(self, name="weight_zero_point", dim=0)
        return replace(self, name="qzeros", dim=1)

    def shape_of(self, words: list[int]) -> tuple[int, int]:
        """Returns (outputs, inputs) of a matrix whose packed shape is `words`."""
        rows, columns = words
        per_word = len(self.order)
        shape = (rows * per_word, columns) if self.dim == 0 else (rows, columns * per_word)
        return shape[::-1] if self.transposed else shape

    def shard(
        self,
        module: str,
        shape: tuple[int, int],
        kept: tuple[slice, slice],
        target: Tensor,
        then: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ) -> Shard:
        """Returns the shard for the part `kept` of a matrix of `shape`, both `[out, in]`. The
        unpacked part goes through `then` into `target`."""
        per_word, name = len(self.order), f"{module}.{self.name}"
        if self.transposed:
            shape, kept = shape[::-1], kept[::-1]
        shape_in_words, index = list(shape), list(kept)
        start, stop = kept[self.dim].start, kept[self.dim].stop
        shape_in_words[self.dim] //= per_word
        # Words at both ends may also contain numbers of other ranks.
        index[self.dim] = slice(start // per_word, -(-stop // per_word))
        skipped = start % per_word
        convert = partial(self._read, name, skipped, stop - start, then)
        return Shard(name, tuple(shape_in_words), tuple(index), target, convert)

    def _read(
        self,
        name: str,
        skipped: int,
        count: int,
        then: Callable[[Tensor], Tensor],
        words: Tensor,
    ) -> Tensor:
        if words.dtype != torch.int32:
            raise ConfigError(f"{name} has dtype {words.dtype}, but packed weights are int32")
        numbers = unpack_words(words, self.bits, self.dim, self.order)
        kept = numbers.narrow(self.dim, skipped, count)
        return then(kept.t() if self.transposed else kept)


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...]) -> Tensor:
    """Unpacks int32 `[m, n]` to uint8, with `dim` longer by the numbers per word: the i-th number
    of a word starts at bit `order[i] * bits`."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * bits
    shifts = shifts[:, None] if dim == 0 else shifts
    numbers = (words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(dim, dim + 1)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Packs uint8 `[m, n]` (values below 16, n even) to `[m, n / 2]`: the first half of a row in
    the low bits, the second in the high bits."""
    low, high = numbers.chunk(2, dim=1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Reverses `pack_nibbles`, directly into `dtype`."""
    rows, half = packed.shape
    numbers = torch.empty(rows, 2, half, dtype=dtype, device=packed.device)
    torch.bitwise_and(packed, 15, out=numbers[:, 0])
    torch.bitwise_right_shift(packed, 4, out=numbers[:, 1])
    return numbers.flatten(1)
