"""The KV blocks of a replica: a pool, and in each sequence a block table, per KV group.

    group         block table of a sequence, entry i for tokens i · block_size …
    all tokens    [7, 3, 9, 4, 8]
    window        [-, -, 2, 5, 0]     before the window: NO_BLOCK
    state         [-, -, -, 1, 6]     after the last full block, and after the last token

A sequence gets blocks in all groups or in none. In a group with a window a block is freed once no
later query can read it (or one block later: `KVGroup.first_kept`); a prompt's blocks there are
allocated chunk by chunk, so a long prompt holds its window and the chunks in flight. A prefix is
cached if every group has the blocks that queries after it read (hashes are the same in all groups).

A recurrent state has a window of two tokens, but is large: a chunk gets blocks for two states only,
its last one and the one after the last full block before, where a later prompt with these tokens
can start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from pdserve.common.core.block_hash import BlockHash
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.sequence import Sequence as EngineSequence

NO_BLOCK = -1
"""Entry of a block table whose tokens no later query reads."""


class CacheListener(Protocol):
    """Receives additions to and removals from the prefix cache, in order. It must not block."""

    def stored(self, sequence: EngineSequence, first: int, end: int) -> None:
        """The sequence's blocks `first … end-1` are cached now, and were not before."""

    def removed(self, block_hash: BlockHash) -> None: ...


@dataclass(frozen=True, slots=True)
class Fit:
    """The blocks that a sequence finds and needs; the tuples have an entry per group."""

    num_blocks: int  # of all its tokens
    num_cached: int  # blocks of the longest cached prefix
    first: tuple[int, ...]  # first block that its next queries read
    cached: tuple[list[int], ...]  # cached blocks that they read
    needed: tuple[int, ...]  # free blocks that it takes, with cached ones that no sequence holds


class KVPool:
    """`pools[g]` has the blocks of `groups[g]`."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        prefix_caching: bool = True,
        in_flight: int = 0,
    ) -> None:
        """`num_blocks`: per group. `in_flight`: tokens that steps compute at a time at most."""
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(count, block_size, prefix_caching) for count in num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.holders: set[EngineSequence] = set()  # sequences with blocks
        self._in_flight = in_flight
        together = zip(self.groups, self.pools, strict=True)
        self._windows = [(i, *each) for i, each in enumerate(together) if each[0].window]
        # The group whose blocks KV events report: the one whose blocks stay useful longest.
        self._shown = next((i for i, group in enumerate(self.groups) if not group.window), 0)
        self._listener: CacheListener | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the first group."""
        return self.pools[0].num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks without references in the group that has the fewest."""
        return min([pool.num_free for pool in self.pools])

    @property
    def num_held(self) -> int:
        """The number of blocks held in the first group; if another group is fuller, the same share
        of the first group's blocks."""
        return max(
            -(-(pool.num_blocks - pool.num_free) * self.num_blocks // pool.num_blocks)
            for pool in self.pools
        )

    def free(self, reserved: int | None = None) -> list[int]:
        """Returns the blocks without references, per group. `reserved`: one block in so many does
        not count."""
        if reserved is None:
            return [pool.num_free for pool in self.pools]
        return [pool.num_free - pool.num_blocks // reserved for pool in self.pools]

    def held(self, sequence: EngineSequence) -> int:
        """Returns the blocks of the sequence in the group whose blocks are kept longest, without
        those that it shares with sequences admitted before it."""
        table = sequence.block_tables[self._shown]
        gone = table.count(NO_BLOCK) if self.groups[self._shown].window else 0
        return max(0, len(table) - gone - sequence.num_shared)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks of the first group that a sequence of `num_tokens` holds."""
        return self.groups[0].most_blocks(num_tokens, self._in_flight, self.block_size)

    def tightest(self, num_tokens: int) -> tuple[int, int, int]:
        """Returns (most blocks that a sequence of `num_tokens` tokens holds, free blocks, blocks)
        of the group that lacks the most for it, or has the least to spare."""
        in_flight, size = self._in_flight, self.block_size
        found = [
            (group.most_blocks(num_tokens, in_flight, size), pool.num_free, pool.num_blocks)
            for group, pool in zip(self.groups, self.pools, strict=True)
        ]
        return min(found, key=lambda each: each[1] - each[0])

    # ---- the prefix cache in KV events ----------------------------------------------------

    def listen(self, listener: CacheListener | None) -> None:
        """Sets the one listener of later changes: of the blocks of the first group without a
        window, or else of the first group."""
        self._listener = listener
        self.pools[self._shown].on_removed = listener.removed if listener else None

    def cached(self) -> list[BlockHash]:
        """Returns the hashes of the cached blocks that a listener follows, parents first."""
        return self.pools[self._shown].cached()

    # ---- admission ------------------------------------------------------------------------

    def fit(self, hashes: Sequence[BlockHash], num_tokens: int, remote: bool) -> Fit:
        """Returns the blocks that a sequence without blocks needs. `hashes`: of the blocks that may
        come from the prefix cache. `remote`: another node computes all its KV."""
        size, total = self.block_size, self.blocks_for(num_tokens)
        count = self._longest_hit(hashes, num_tokens if remote else None)
        first, cached, needed = [], [], []
        for group, pool in zip(self.groups, self.pools, strict=True):
            begin = _first(group, size, count, num_tokens if remote else None)
            found = pool.lookup(hashes[begin:count])
            taken = total - max(begin, count) + pool.count_unheld(found)
            first.append(begin)
            cached.append(found)
            needed.append(min(taken, group.most_blocks(num_tokens, self._in_flight, size)))
        return Fit(total, count, tuple(first), tuple(cached), tuple(needed))

    def has_room(
        self,
        fit: Fit,
        spare: int,
        running: Iterable[EngineSequence] = (),
        reserved: int | None = None,
    ) -> bool:
        """Returns whether every group has the blocks for it, `spare` more, and those that prompts
        among `running` will still need for their chunks. `reserved`: as `free`."""
        if any(
            needed + spare > free
            for needed, free in zip(fit.needed, self.free(reserved), strict=True)
        ):
            return False
        return all(
            fit.needed[i] + spare + sum(self._promised(i, each) for each in running)
            <= self.free(reserved)[i]
            for i, _, _ in self._windows
        )

    def admit(self, sequence: EngineSequence, fit: Fit) -> None:
        """Gives the sequence its blocks; the caller has checked `has_room`. Where a local prompt
        has a window, `extend` allocates what is not cached."""
        tables = []
        found = fit.cached[self._shown]
        sequence.num_shared = len(found) - self.pools[self._shown].count_unheld(found)
        for i, pool in enumerate(self.pools):
            pool.hold(fit.cached[i])
            table = [NO_BLOCK] * fit.first[i] + fit.cached[i]
            if sequence.remote or self.groups[i].window is None:
                table += pool.allocate(fit.num_blocks - len(table))
            tables.append(table)
        self.holders.add(sequence)
        sequence.block_tables = tables
        sequence.num_computed = sequence.num_scheduled = fit.num_cached * self.block_size

    def awaited(self, sequence: EngineSequence) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields, per group, (index of the first block, blocks from there on) of those that a
        remote sequence waits for: neither cached nor before the window."""
        for table in sequence.block_tables:
            first = sequence.num_computed // self.block_size
            while first < len(table) and table[first] == NO_BLOCK:
                first += 1
            yield first, tuple(table[first:])

    # ---- while it is computed -------------------------------------------------------------

    def grow(self, sequence: EngineSequence, num_tokens: int, reserved: int | None = None) -> bool:
        """Allocates blocks until the sequence's blocks hold `num_tokens` tokens, in all groups; if
        one lacks free blocks, allocates in none and returns False. `reserved`: as `free`."""
        needed = self.blocks_for(num_tokens)
        for table in sequence.block_tables:
            if len(table) < needed:
                break
        else:
            return True  # the usual case, which costs little
        more = [max(0, needed - len(table)) for table in sequence.block_tables]
        if any(
            count and count > free for count, free in zip(more, self.free(reserved), strict=True)
        ):
            return False
        for table, count, pool in zip(sequence.block_tables, more, self.pools, strict=True):
            table += pool.allocate(count)
        return True

    def extend(self, sequence: EngineSequence, num_tokens: int) -> int:
        """Like `grow`, as far as there are free blocks; returns how many of the tokens fit."""
        fitting = num_tokens
        for i, group, pool in self._windows:  # states last, which need to know where it ends
            table = sequence.block_tables[i]
            missing = self.blocks_for(fitting) - len(table)
            if group.state:
                written = min(2, missing)
                if 0 < written <= pool.num_free:
                    table += [NO_BLOCK] * (missing - written) + pool.allocate(written)
            else:
                table += pool.allocate(max(0, min(missing, pool.num_free)))
            fitting = min(fitting, self.block_size * len(table))
        return min(fitting, self.block_size * min(map(len, sequence.block_tables)))

    def computed(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Records that the KV of the sequence's next `num_tokens` tokens exists: registers full
        blocks and frees blocks before the window. No draft and no step in flight reads those, since
        their queries come after these tokens."""
        before = sequence.num_computed
        first = before // self.block_size
        sequence.num_computed += num_tokens
        full = sequence.num_computed // self.block_size
        if self.prefix_caching and full > first:
            hashes = sequence.hashes(self.block_size)
            for i, (table, pool) in enumerate(zip(sequence.block_tables, self.pools, strict=True)):
                new = [
                    index
                    for index in range(first, full)
                    if table[index] != NO_BLOCK and pool.register(table[index], hashes[index])
                ]
                if self._listener is not None and i == self._shown:
                    for start, end in _runs(new):
                        self._listener.stored(sequence, start, end)
        for i, group, pool in self._windows:
            table = sequence.block_tables[i]
            left = group.first_kept(before, self.block_size)
            kept = group.first_kept(sequence.num_computed, self.block_size)
            pool.free(_held(table[left:kept]))
            table[left:kept] = [NO_BLOCK] * (kept - left)

    # ---- the end --------------------------------------------------------------------------

    def forget(self, sequence: EngineSequence) -> None:
        """Removes the sequence's blocks from the prefix cache: their content may be wrong."""
        for table, pool in zip(sequence.block_tables, self.pools, strict=True):
            pool.forget(_held(table))

    def release(self, sequence: EngineSequence) -> int:
        """Takes all blocks from the sequence; returns how many it had. One that waits has no
        tables."""
        count = 0
        for table, pool in zip(sequence.block_tables, self.pools, strict=False):
            held = _held(table)
            pool.free(held)
            count += len(held)
        self.holders.discard(sequence)
        sequence.block_tables = []
        return count

    # ---- inside ---------------------------------------------------------------------------

    def _longest_hit(self, hashes: Sequence[BlockHash], remote_tokens: int | None) -> int:
        """Returns the length of the longest prefix of `hashes` for which every group has the blocks
        that queries after it read (`_first`)."""
        length = len(hashes)
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                length = len(pool.lookup(hashes[:length]))
        shorter = length
        while True:
            for _, group, pool in self._windows:
                shorter = self._hit_of_window(group, pool, hashes[:shorter], remote_tokens)
            if shorter == length:
                return length
            length = shorter

    def _hit_of_window(
        self,
        group: KVGroup,
        pool: BlockPool,
        hashes: Sequence[BlockHash],
        remote_tokens: int | None,
    ) -> int:
        end = index = len(hashes)  # blocks index … end-1 are cached
        while index > _first(group, self.block_size, end, remote_tokens):
            index -= 1
            if hashes[index] not in pool:
                end = index
        return end

    def _promised(self, i: int, sequence: EngineSequence) -> int:
        """Returns the blocks that the sequence's present tokens will still need in a group with a
        window."""
        table = sequence.block_tables[i]
        missing = self.blocks_for(sequence.num_tokens) - len(table)
        if missing <= 0:
            return 0
        held = len(table) - table.count(NO_BLOCK)
        most = self.groups[i].most_blocks(sequence.num_tokens, self._in_flight, self.block_size)
        return max(0, min(missing, most - held))


def _first(group: KVGroup, block_size: int, num_cached: int, remote_tokens: int | None) -> int:
    """Returns the index of the first block that a sequence with `num_cached` cached blocks needs:
    the first one that its next query reads or, if its KV comes from another node, the first one
    kept of its `remote_tokens` tokens."""
    if remote_tokens is None:
        return group.first_block(num_cached * block_size, block_size)
    return group.first_kept(remote_tokens, block_size)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of the runs of neighbours among ascending numbers."""
    for _, run in groupby(enumerate(indices), lambda each: each[1] - each[0]):
        members = [index for _, index in run]
        yield members[0], members[-1] + 1


def _held(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]
