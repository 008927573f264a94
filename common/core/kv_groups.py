"""KV groups: which layers keep which part of a sequence's KV. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has one shape and one lifetime, so that one block table serves all of them.

    `layers` are numbers in the model, ascending. A token has `num_kv_heads` times `planes` vectors
    of `head_dim` in each of them: a key and a value, or one latent. A query attends to `window`
    tokens, itself included; None: to all tokens before it too.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    planes: int = 2

    @property
    def name(self) -> str:
        return f"windows of {self.window} tokens" if self.window else "full attention"

    def layers_between(self, start: int, end: int) -> tuple[int, int]:
        """Returns the range of indices into `layers` that lie in model layers `start…end-1`."""
        return bisect_left(self.layers, start), bisect_left(self.layers, end)

    def first_block(self, position: int, block_size: int) -> int:
        """Returns the index of the first block that the query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

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
        return min(blocks, -(-(self.window + in_flight) // block_size) + 2)


def kv_groups(
    layer_windows: tuple[int | None, ...], num_kv_heads: int, head_dim: int, planes: int = 2
) -> tuple[KVGroup, ...]:
    """Returns the groups of a model, full attention first, then windows from long to short. They
    follow from the model alone, so that nodes of every layout number them alike."""
    windows = sorted(set(layer_windows), key=lambda window: (window is not None, -(window or 0)))
    return tuple(
        KVGroup(
            tuple(i for i, each in enumerate(layer_windows) if each == window),
            num_kv_heads,
            head_dim,
            window,
            planes,
        )
        for window in windows
    )
