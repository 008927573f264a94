"""KV groups: which layers keep which part of a sequence's KV. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

STATE_WINDOW = 2
"""The window of a recurrent state in tokens: its own token, and the one of the state before."""
STATES_HELD = 4
"""Most state blocks that a sequence holds while a chunk is computed: two that the chunk may read or
leave for other sequences, and two that it writes. With more chunks in flight, as in a pipeline, it
may hold two more per chunk until they are computed."""

KV_AUTO = "auto"
KV_CACHE_DTYPES = (KV_AUTO, "fp8_e4m3", "int8")
"""Values of --kv-cache-dtype; auto: the dtype of computation."""
MAX_PART_LENGTH = 256  # characters of a part of a node's KV identity, as routers accept it
_SCALE_BYTES = 4  # a float32 scale after the 8-bit elements of each row


def kv_row(head_dim: int, dtype: str, kv_cache_dtype: str) -> tuple[int, str]:
    """Returns (elements, dtype) of a cache row: one token's key or value of one head."""
    if kv_cache_dtype == KV_AUTO:
        return head_dim, dtype
    return head_dim + _SCALE_BYTES, "uint8"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV that a layer keeps per token, and for how long; fields as in `KVGroup`."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False
    planes: int = 2
    state: bool = False

    @classmethod
    def of_state(cls, num_heads: int, numbers: int) -> LayerKV:
        """Returns the KV of a layer with a recurrent state: `numbers` float32 elements a head."""
        return cls(num_heads, numbers, window=STATE_WINDOW, planes=1, state=True)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int, bool, int]:
        """The sort key of its group: full attention first, then windows from long to short, then
        states."""
        size = -self.num_kv_heads, -self.head_dim
        windowed = self.window is not None, -(self.window or 0)
        return self.state, *windowed, *size, self.chunked, self.planes


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has one shape and one lifetime, so that one block table serves all of them.

    `layers`: indices of model layers, ascending. In each of them a token has `num_kv_heads` ×
    `planes` vectors of `head_dim` elements: a key and a value (2 planes), or a latent (1 plane). A
    query attends to the last `window` tokens, including its own; None: to all earlier tokens.
    `chunked`: instead to the tokens of its own chunk of `window` tokens (Llama 4).

    `state`: a block holds no tokens but the layer's recurrent state after the last computed token
    of the block: `head_dim` float32 elements per head. Only the block in which a chunk ends, and
    the block before it, hold a state (`KVPool.extend`).
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
        """Returns (slots, elements per slot) of a block, per layer, plane and head."""
        return (1, self.head_dim) if self.state else (block_size, self.head_dim)

    def row(self, dtype: str, kv_cache_dtype: str) -> tuple[int, str]:
        """Returns (elements, dtype) of a cache slot of one head: see `kv_row`."""
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
        """Returns the index of the first block that a sequence of `num_tokens` tokens keeps: the
        first one that is read by the query after the full blocks before the last token. A later
        sequence with these tokens computes at least the last one, so it finds all it reads."""
        return self.first_block(max(0, num_tokens - 1) // block_size * block_size, block_size)

    def most_blocks(self, num_tokens: int, in_flight: int, block_size: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` tokens holds at a time, if steps
        compute up to `in_flight` of them at a time."""
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
    """Returns the groups of a model whose layers differ only in their windows."""
    return grouped(
        [LayerKV(num_kv_heads, head_dim, window, planes=planes) for window in layer_windows]
    )


def grouped(layers: Sequence[LayerKV | int]) -> tuple[KVGroup, ...]:
    """Returns the groups of a model, full attention first, then windows from long to short, then
    states. The order depends on the model alone, so nodes of every parallel layout number groups
    alike. An integer in `layers` is a layer that attends to the KV of the layer with that index; if
    it is its own index, it keeps no KV."""
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
