"""The scheduler's side of a draft model's KV cache; `common/worker/drafter.py` is the rank's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import NewSequence, SequenceDelta
from pdserve.common.engine.sequence import Sequence
from pdserve.common.engine.speculation import NO_DRAFT, Draft, Speculator


class DraftModel(Speculator):
    """A smaller model on the same ranks drafts tokens at the beginning of a step. This class tracks
    what it has computed of each sequence, in which blocks of its own cache. Blocks follow the
    scheduler's rules, but a sequence without blocks does not wait: it decodes without drafts.

    KV from a prefill node or the prefix cache is not the draft model's, so the draft model computes
    prompts itself, in chunks. Meanwhile their sequences decode without drafts, so first tokens are
    not delayed.
    """

    def __init__(
        self,
        config: Speculation,
        max_model_len: int,
        pool: BlockPool,
        chunk: int,
        num_groups: int = 1,
    ) -> None:
        """`max_model_len`: the shorter one of both models'. `pool`: blocks of the draft model's
        cache. `chunk`: prompt tokens it computes per step. `num_groups`: its KV groups, which share
        one block table: windows free no blocks."""
        super().__init__(config, max_model_len)
        self._pool = pool
        self._num_groups = num_groups
        self._chunk = self._left = chunk
        self._drafted: dict[int, _Drafted] = {}  # by seq_id
        self._deltas: list[SequenceDelta] = []

    def draft(self, sequence: Sequence, most: int) -> Draft:
        drafted = self._drafted.get(sequence.seq_id) or self._begin(sequence)
        self._register(sequence, drafted)
        behind = sequence.num_tokens - drafted.num_computed
        few = behind <= self.config.num_speculative_tokens + 1  # e.g. after steps without drafts
        count = behind if few else min(behind, self._left)
        guessed = most if count == behind else 0
        if not count or not self._grow(drafted, drafted.num_computed + count + guessed):
            return NO_DRAFT
        self._left -= 0 if few else count
        self._deltas.append(drafted.delta(sequence, count, guessed))
        return Draft(guessed)

    def drafting(self) -> tuple[SequenceDelta, ...]:
        deltas, self._deltas, self._left = tuple(self._deltas), [], self._chunk
        return deltas

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """The draft model has computed KV of all its drafts except the last one."""
        super().verified(sequence, num_drafts, num_accepted)
        if (drafted := self._drafted.get(sequence.seq_id)) is not None:
            drafted.num_computed += min(num_accepted, num_drafts - 1)

    def forget(self, sequence: Sequence) -> None:
        if (drafted := self._drafted.pop(sequence.seq_id, None)) is not None:
            self._pool.free(drafted.block_table)

    def _begin(self, sequence: Sequence) -> _Drafted:
        size = self._pool.block_size
        usable = (sequence.num_tokens - 1) // size
        blocks = self._pool.lookup(sequence.hashes(size)[:usable])
        self._pool.hold(blocks)
        computed = len(blocks) * size
        self._drafted[sequence.seq_id] = drafted = _Drafted(blocks, computed, self._num_groups)
        drafted.num_registered = len(blocks)
        return drafted

    def _grow(self, drafted: _Drafted, num_tokens: int) -> bool:
        more = self._pool.blocks_for(num_tokens) - len(drafted.block_table)
        if more > self._pool.num_free:
            return False
        if more > 0:
            drafted.block_table += self._pool.allocate(more)
        return True

    def _register(self, sequence: Sequence, drafted: _Drafted) -> None:
        """Registers the blocks that earlier steps have filled."""
        full = drafted.num_computed // self._pool.block_size
        if self._pool.prefix_caching and full > drafted.num_registered:
            hashes = sequence.hashes(self._pool.block_size)
            for index in range(drafted.num_registered, full):
                self._pool.register(drafted.block_table[index], hashes[index])
        drafted.num_registered = full


@dataclass(slots=True)
class _Drafted:
    """A draft model's state of a sequence: it has KV of tokens `[0, num_computed)`."""

    block_table: list[int]
    num_computed: int
    num_groups: int
    num_registered: int = 0  # blocks
    num_known: int | None = None  # blocks that the ranks know; None: the sequence is new to them

    def delta(self, sequence: Sequence, count: int, num_drafts: int) -> SequenceDelta:
        """Returns the draft model's next work: compute `count` tokens, then draft `num_drafts`."""
        start, known, params = self.num_computed, self.num_known, sequence.sampling
        new = None
        if known is None:
            # Drafts need neither min_tokens nor log-probabilities.
            new = NewSequence(
                sampling=replace(params, logprobs=None, min_tokens=0),
                num_prompt_tokens=sequence.num_prompt_tokens,
                seed=params.seed + sequence.choice,
            )
        self.num_computed += count
        self.num_known = len(self.block_table)
        return SequenceDelta(
            seq_id=sequence.seq_id,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            num_blocks=(known or 0,) * self.num_groups,
            new_block_ids=(tuple(self.block_table[known or 0 :]),) * self.num_groups,
            samples=num_drafts > 0,
            new=new,
            num_drafts=num_drafts,
        )
