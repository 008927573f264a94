"""An index of the prefixes that nodes have cached: pure, bounded, with fast look-ups.

    block hash ──▶ set of places, as a bit mask           place: a replica of a node

Hashes are chained, so a block's hash stands for all before it too, and a place that has a block has
had those before it. Caches drop the last blocks of a prompt first. So the longest prefix that a
place has is found by bisection: a dozen look-ups for 2,000 blocks. If a place has lost a block amid
others, which is rare, the answer for it may be wrong. Nothing depends on it but speed. Caches of
recurrent states alone are searched from a prompt's end (`match_states`).

A dictionary of integers of 60 bits takes 62 to 93 bytes a block, 0.95 GB for 10 million. It is kept
in many small ones, because a large one stops the router for a second when it grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice

from pdserve.common.core.block_hash import DIGEST, BlockHasher, begun, packed, root_hash, short_hash
from pdserve.router.cluster.policy import Blocks

MAX_BLOCKS = 10_000_000
SHARDS = 1024  # a power of two
FIRST_STEP = 32  # blocks
EVICTED = 16  # a full shard loses one block of this many, the oldest ones
SWEEP_STEP = 1024  # blocks; some 0.1 ms
MAX_INTERNED = 1 << 16  # sets of places of which one copy is shared
_KEY = (1 << 60) - 1  # an integer of more bits takes half as much again


class PromptBlocks:
    """The hashes of a prompt's full blocks, computed when they are asked for. A look-up asks for
    few, so the tokens between two of them are hashed in one call."""

    def __init__(
        self, token_ids: Sequence[int], block_size: int, cache_salt: str = "", adapter: str = ""
    ) -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._root = root_hash(cache_salt, adapter)
        self._hashes: dict[int, int] = {}  # by the block's index
        self._counts = [0]  # numbers of blocks, ascending
        self._states = [begun(self._root)]  # the hash so far, at each of these

    def __len__(self) -> int:
        return len(self._token_ids) // self._block_size

    @property
    def num_hashed(self) -> int:
        return self._counts[-1]

    def __getitem__(self, index: int) -> int:
        """Returns the hash of block `index`, as in KV events."""
        if (found := self._hashes.get(index)) is None:
            if not 0 <= index < len(self):
                raise IndexError(index)
            found = self._hashes[index] = self._hash(index + 1)
        return found

    def __iter__(self) -> Iterator[int]:
        """Hashes the whole prompt, block by block."""
        hasher, end = BlockHasher(self._block_size, self._root), len(self) * self._block_size
        return map(short_hash, hasher.extend(self._token_ids, 0, end))

    def _hash(self, count: int) -> int:
        """Returns the hash of the first `count` blocks, from the nearest known state before."""
        at, size = bisect_left(self._counts, count), self._block_size
        state = self._states[at - 1].copy()
        state.update(packed(self._token_ids, self._counts[at - 1] * size, count * size))
        self._counts.insert(at, count)
        self._states.insert(at, state)
        return short_hash(state.digest()[:DIGEST])


class PrefixIndex:
    """Places by block. Every method takes and gives hashes as KV events name them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._most = max(EVICTED, max_blocks // SHARDS)  # blocks of a shard
        self._bits: dict[Hashable, int] = {}  # by place
        self._places: dict[int, Hashable] = {}  # by bit
        self._counts: dict[int, int] = {}  # blocks by bit
        self._live = 0  # the bits of places
        self._retired = 0  # bits that may still be in masks, of places that were cleared
        self._interned: dict[int, int] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        """Returns the number of blocks that some place has, or had when it was cleared a moment
        ago."""
        return sum(map(len, self._shards))

    def num_blocks(self, place: Hashable) -> int:
        """Returns the number of known blocks of the place."""
        bit = self._bits.get(place)
        return 0 if bit is None else self._counts[bit]

    # ---- updates from KV events -------------------------------------------------------------

    def store(self, place: Hashable, hashes: Iterable[int]) -> None:
        """Notes that the place has these blocks."""
        bit = self._bit_of(place)
        for block_hash in hashes:
            key = block_hash & _KEY
            shard = self._shards[key % SHARDS]
            mask = shard.get(key, 0)
            if mask & bit:
                continue
            if not mask and len(shard) >= self._most:
                self._evict(shard)
            shard[key] = self._intern(mask | bit)
            self._counts[bit] += 1

    def remove(self, place: Hashable, hashes: Iterable[int]) -> int:
        """Notes that the place has dropped these blocks; returns how many of them were not known to
        be there."""
        bit, unknown = self._bits.get(place, 0), 0
        for block_hash in hashes:
            key = block_hash & _KEY
            shard = self._shards[key % SHARDS]
            mask = shard.get(key, 0)
            if not mask & bit:
                unknown += 1
                continue
            if mask == bit:
                del shard[key]
            else:
                shard[key] = self._intern(mask & ~bit)
            self._counts[bit] -= 1
        return unknown

    def clear(self, place: Hashable) -> None:
        """Forgets the place. `sweep` frees its memory."""
        bit = self._bits.pop(place, None)
        if bit is not None:
            del self._places[bit]
            self._live &= ~bit
            self._retired |= bit if self._counts.pop(bit) else 0

    # ---- who has a prefix -------------------------------------------------------------------

    def match(self, blocks: Blocks) -> dict[Hashable, int]:
        """Returns how many of a prompt's first blocks each place has; places with none are left
        out."""
        found: dict[Hashable, int] = {}
        at = 0  # `alive` have all blocks up to this one
        alive = self._mask(blocks, 0) & self._live if len(blocks) else 0
        while alive:
            at = self._first_gap(blocks, alive, at)
            stay = alive & self._mask(blocks, at) if at < len(blocks) else 0
            for bit in _bits(alive & ~stay):
                found[self._places[bit]] = at
            alive = stay
        return found

    def match_states(self, blocks: Blocks) -> dict[Hashable, int]:
        """Like `match`, if blocks hold recurrent states: a place then has few blocks of a prompt,
        and the last of them is enough. Hashes the whole prompt."""
        found: dict[Hashable, int] = {}
        lacking = self._live
        hashes = list(blocks) if lacking else []
        for at in range(len(hashes), 0, -1):
            if has := lacking & self._mask(hashes, at - 1):
                found |= {self._places[bit]: at for bit in _bits(has)}
                lacking &= ~has
            if not lacking:
                break
        return found

    def _first_gap(self, blocks: Blocks, alive: int, has: int) -> int:
        """Returns the first block after `has` that not all of `alive` have: by doubling steps, so
        that at most twice the cached blocks are hashed, then by bisection."""
        step, end = FIRST_STEP, len(blocks)
        while True:
            lacks = min(has + step, end)
            if lacks == end or alive & ~self._mask(blocks, lacks):
                break
            has, step = lacks, 2 * step
        while lacks - has > 1:
            middle = (has + lacks) // 2
            if alive & ~self._mask(blocks, middle):
                lacks = middle
            else:
                has = middle
        return lacks

    def _mask(self, blocks: Blocks, index: int) -> int:
        key = blocks[index] & _KEY
        return self._shards[key % SHARDS].get(key, 0)

    # ---- memory -----------------------------------------------------------------------------

    def _bit_of(self, place: Hashable) -> int:
        if (bit := self._bits.get(place)) is None:
            free = ~(self._live | self._retired)
            bit = free & -free
            self._bits[place], self._places[bit], self._counts[bit] = bit, place, 0
            self._live |= bit
        return bit

    def _intern(self, mask: int) -> int:
        """Returns the one copy of a mask; small integers are shared by Python."""
        if mask < 256:
            return mask
        if len(self._interned) >= MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)

    def _evict(self, shard: dict[int, int]) -> None:
        for key in list(islice(shard, max(1, len(shard) // EVICTED))):
            for bit in _bits(shard.pop(key) & self._live):
                self._counts[bit] -= 1
            self.num_evicted += 1

    @property
    def num_retired(self) -> int:
        """Returns how many cleared places wait for `sweep`."""
        return self._retired.bit_count()

    def sweep(self) -> Iterator[None]:
        """Takes the places that have been cleared so far out of all blocks, in steps of
        `SWEEP_STEP` blocks. Blocks may be stored and removed between the steps."""
        retired = self._retired
        for shard in self._shards:
            keys = list(shard)
            for start in range(0, len(keys), SWEEP_STEP):
                for key in keys[start : start + SWEEP_STEP]:
                    if not (mask := shard.get(key, 0)) & retired:
                        continue
                    if mask := mask & ~retired:
                        shard[key] = self._intern(mask)
                    else:
                        del shard[key]
                yield
        self._retired &= ~retired


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
