"""Numbers of 4 or 8 bits in 32-bit words, as AWQ and GPTQ files hold them, and two to a byte, as
they are held in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.sharding import Shard

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word AutoAWQ puts each of eight outputs


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """How a file holds a `[in, out]` matrix of numbers: words run along one of its dimensions."""

    bits: int
    dim: int  # 0: a word is of several inputs; 1: of several outputs
    order: tuple[int, ...]  # where in a word, from its low bits, each of its numbers lies

    @classmethod
    def of(cls, method: str, bits: int) -> PackedMatrix:
        """The `qweight` of "awq" or "gptq"."""
        if method == "awq":
            return cls(bits, 1, AWQ_ORDER)
        return cls(bits, 0, tuple(range(WORD_BITS // bits)))

    def along_outputs(self) -> PackedMatrix:
        """The `qzeros` beside it, which both methods pack along outputs."""
        return replace(self, dim=1)

    def shard(
        self,
        name: str,
        shape: tuple[int, int],
        kept: tuple[slice, slice],
        target: Tensor,
        then: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ) -> Shard:
        """What to read for the part `kept` of the `shape` of numbers. `target` gets it turned
        to `[out, in]` and passed through `then`."""
        per_word = len(self.order)
        shape_in_words, index = list(shape), list(kept)
        start, stop = kept[self.dim].start, kept[self.dim].stop
        shape_in_words[self.dim] //= per_word
        # Words at the ends may hold numbers of other ranks too.
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
            raise ConfigError(f"{name} holds {words.dtype}, not the int32 of packed numbers")
        numbers = unpack_words(words, self.bits, self.dim, self.order)
        return then(numbers.narrow(self.dim, skipped, count).t())


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...]) -> Tensor:
    """int32 `[m, n]` → uint8, `dim` longer by the numbers in a word: the i-th of a word is in its
    bits from `order[i] * bits`."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * bits
    shifts = shifts[:, None] if dim == 0 else shifts
    numbers = (words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(dim, dim + 1)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """uint8 `[m, n]` below 16, n even → `[m, n / 2]`: the first half of a row in the low bits, the
    second in the high ones."""
    low, high = numbers.chunk(2, dim=1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack_nibbles` was given, as `dtype`, with no copy in between."""
    rows, half = packed.shape
    numbers = torch.empty(rows, 2, half, dtype=dtype, device=packed.device)
    torch.bitwise_and(packed, 15, out=numbers[:, 0])
    torch.bitwise_right_shift(packed, 4, out=numbers[:, 1])
    return numbers.flatten(1)
