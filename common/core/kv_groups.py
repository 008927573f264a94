"""KV groups: which layers keep which part of a sequence's KV. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

STATE_WINDOW = 2
"""A state depends on its token and on the state before, as if a query saw two tokens."""
STATES_HELD = 4
"""Blocks of a state that a sequence holds at most while a chunk of it is computed: two that the
chunk may read or leave for others, and the two that it writes. With more chunks in flight, as in a
pipeline, it may hold two more for each until they are computed."""

KV_AUTO = "auto"
KV_CACHE_DTYPES = (KV_AUTO, "fp8_e4m3", "int8")
"""Values of --kv-cache-dtype; auto: the dtype of computation."""
_SCALE_BYTES = 4  # a float32 behind the 8-bit numbers of each row


def kv_row(head_dim: int, dtype: str, kv_cache_dtype: str) -> tuple[int, str]:
    """Returns the numbers and the dtype of a row of the cache: a token's key or value of a head."""
    if kv_cache_dtype == KV_AUTO:
        return head_dim, dtype
    return head_dim + _SCALE_BYTES, "uint8"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Says what one layer keeps of a token, and for how long: as in `KVGroup`."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False
    planes: int = 2
    state: bool = False

    @classmethod
    def of_state(cls, num_heads: int, numbers: int) -> LayerKV:
        """Returns what a layer with a recurrent state keeps: `numbers` of float32 per head."""
        return cls(num_heads, numbers, window=STATE_WINDOW, planes=1, state=True)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int, bool, int]:
        """The place of its group: full attention first, then windows from long to short, then
        states."""
        size = -self.num_kv_heads, -self.head_dim
        windowed = self.window is not None, -(self.window or 0)
        return self.state, *windowed, *size, self.chunked, self.planes


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has one shape and one lifetime, so that one block table serves all of them.

    `layers` are numbers in the model, ascending. A token has `num_kv_heads` times `planes` vectors
    of `head_dim` in each of them: a key and a value, or one latent. A query attends to `window`
    tokens, itself included; None: to all tokens before it too. `chunked`: instead of the last
    `window` tokens, to those of its own chunk of so many (Llama 4).

    `state`: a block holds no tokens but the layer's recurrent state after the last one that is
    computed of the block: `head_dim` float32 numbers per head. Only blocks where a chunk ends, and
    the one before, hold any (`KVPool.extend`).
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    planes: int = 2
    chunked: bool = False
    state: bool = False

    @property
    def name(self) -> str:
        if self.state:
            return "states"
        kind = "chunks" if self.chunked else "windows"
        return f"{kind} of {self.window} tokens" if self.window else "full attention"

    def page(self, block_size: int) -> tuple[int, int]:
        """Returns (slots, numbers in each) of a block, per layer, plane and head."""
        return (1, self.head_dim) if self.state else (block_size, self.head_dim)

    def row(self, dtype: str, kv_cache_dtype: str) -> tuple[int, str]:
        """Returns the numbers and the dtype of a slot of the cache, of one head: see `kv_row`."""
        if self.state:
            return self.head_dim, "float32"
        return kv_row(self.head_dim, dtype, kv_cache_dtype)

    def layers_between(self, start: int, end: int) -> tuple[int, int]:
        """Returns the range of indices into `layers` that lie in model layers `start…end-1`."""
        return bisect_left(self.layers, start), bisect_left(self.layers, end)

    def first_block(self, position: int, block_size: int) -> int:
        """Returns the index of the first block that the query at `position` reads."""
        if self.window is None:
            return 0
        if self.chunked:
            return position // self.window * self.window // block_size
        return max(0, position - self.window + 1) // block_size

    def head_range(self, rank: int, size: int) -> tuple[int, int]:
        """Returns the KV heads `start, end` that one of `size` ranks holds: see `head_range`."""
        return head_range(self.num_kv_heads, rank, size)

    def first_kept(self, num_tokens: int, block_size: int) -> int:
        """Returns the index of the first block that is kept of `num_tokens` tokens: the first one
        that the query after the full blocks before the last token reads. So another sequence of
        these tokens, which computes at least the last one, finds the blocks before it cached."""
        return self.first_block(max(0, num_tokens - 1) // block_size * block_size, block_size)

    def most_blocks(self, num_tokens: int, in_flight: int, block_size: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` tokens holds at once, of which
        `in_flight` are computed at a time."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        if self.state:
            return min(blocks, STATES_HELD)
        return min(blocks, -(-(self.window + in_flight) // block_size) + 2)


def head_range(num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the range `start, end` of KV heads that a rank holds. With more ranks than KV heads,
    neighbouring ranks hold the same head."""
    if size <= num_kv_heads:
        count = num_kv_heads // size
        return rank * count, (rank + 1) * count
    start = rank * num_kv_heads // size
    return start, start + 1


def kv_groups(
    layer_windows: tuple[int | None, ...], num_kv_heads: int, head_dim: int, planes: int = 2
) -> tuple[KVGroup, ...]:
    """Returns the groups of a model whose layers differ in their windows alone."""
    return grouped(
        [LayerKV(num_kv_heads, head_dim, window, planes=planes) for window in layer_windows]
    )


def grouped(layers: Sequence[LayerKV | int]) -> tuple[KVGroup, ...]:
    """Returns the groups of a model, full attention first, then windows from long to short, then
    states. They follow from the model alone, so that nodes of every layout number them alike. A
    layer that is a number keeps nothing: it attends to that layer's KV, or if that is its own
    number to none."""
    kinds = {each for each in layers if isinstance(each, LayerKV)}
    return tuple(
        KVGroup(
            tuple(i for i, each in enumerate(layers) if each == kind),
            kind.num_kv_heads,
            kind.head_dim,
            kind.window,
            kind.planes,
            kind.chunked,
            kind.state,
        )
        for kind in sorted(kinds, key=lambda kind: kind.rank)
    )
