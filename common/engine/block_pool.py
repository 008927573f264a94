"""The pool of physical KV blocks, with reference counts and the prefix cache.

    allocate / hold ──▶ held (ref ≥ 1) ──free──▶ unheld (ref 0), oldest first ──allocate──▶ …
                            │                        │
                            └── register(hash) ──────┴── lookup(hash) finds it in both states

A block is written only by the one sequence that allocated it, and only until it is full;
full blocks are registered under their hash and shared read-only. Freed blocks keep their
content and hash until they are allocated again (LRU), so the prefix cache costs no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from pdserve.common.core.block_hash import BlockHash


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._unheld: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.on_removed: Callable[[BlockHash], None] | None = None
        """Called with the hash of each block that leaves the prefix cache."""

    @property
    def num_free(self) -> int:
        """The number of blocks without references, cached ones included."""
        return len(self._unheld)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def cached(self) -> list[BlockHash]:
        """Returns the hashes of all cached blocks, in the order in which they came."""
        return list(self._block_of)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Returns whether a block with this hash is cached."""
        return block_hash in self._block_of

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `hashes`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """Returns how many of the blocks have no references."""
        return sum(self._refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Takes a reference on each block that `lookup` has returned."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._unheld[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one reference each. The caller has checked `num_free`."""
        if count > len(self._unheld):
            raise RuntimeError(f"{count} blocks asked for, {len(self._unheld)} free")
        return [self._take_oldest() for _ in range(count)]

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one reference on each. The last blocks of a sequence are reused first, since
        the first ones are the prefixes others share."""
        for block in reversed(list(blocks)):
            if self._refs[block] <= 0:
                raise RuntimeError(f"block {block} freed twice")
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            self._unheld[block] = None
            if block not in self._hash_of:
                self._unheld.move_to_end(block, last=False)

    def register(self, block: int, block_hash: BlockHash) -> bool:
        """Makes a full block available to `lookup`, unless another block has the same hash; returns
        whether it did."""
        if not self.prefix_caching or block_hash in self._block_of:
            return False
        self._forget(block)
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Removes blocks from the prefix cache, because their content may be wrong."""
        for block in blocks:
            self._forget(block)

    def _take_oldest(self) -> int:
        block, _ = self._unheld.popitem(last=False)
        self._forget(block)
        self._refs[block] = 1
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self.on_removed is not None:
                self.on_removed(block_hash)
