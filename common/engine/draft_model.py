"""What a draft model is told: the scheduler's side of its KV cache (`drafter.py` is the rank's)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import NewSequence, SequenceDelta
from pdserve.common.engine.sequence import Sequence
from pdserve.common.engine.speculation import NO_DRAFT, Draft, Speculator


class DraftModel(Speculator):
    """A smaller model guesses, on the same ranks, at the beginning of a step. Here is what it has
    computed of each sequence, in which blocks of its own cache: all the scheduler's rules for
    blocks, but that one without blocks does not wait: it is not guessed.

    Whatever KV a sequence came with, from a prefill node or the prefix cache, is not the draft
    model's, so it computes prompts itself, in chunks, while their sequences decode without it: no
    first token waits for that.
    """

    def __init__(
        self, config: Speculation, max_model_len: int, pool: BlockPool, chunk: int
    ) -> None:
        """`max_model_len` is the shorter one of both models'; `pool` of the draft model's cache;
        `chunk`: tokens of prompts it computes in a step."""
        super().__init__(config, max_model_len)
        self._pool = pool
        self._chunk = self._left = chunk
        self._drafted: dict[int, _Drafted] = {}  # by seq_id
        self._deltas: list[SequenceDelta] = []

    def draft(self, sequence: Sequence, most: int) -> Draft:
        drafted = self._drafted.get(sequence.seq_id) or self._begin(sequence)
        self._register(sequence, drafted)
        behind = sequence.num_tokens - drafted.num_computed
        few = behind <= self.config.num_speculative_tokens + 1  # as after some steps without it
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
        """It has computed its guesses but for the last one."""
        super().verified(sequence, num_drafts, num_accepted)
        if (drafted := self._drafted.get(sequence.seq_id)) is not None:
            drafted.num_computed += min(num_accepted, num_drafts - 1)

    def forget(self, sequence: Sequence) -> None:
        if (drafted := self._drafted.pop(sequence.seq_id, None)) is not None:
            self._pool.free(drafted.block_table)

    def _begin(self, sequence: Sequence) -> _Drafted:
        size = self._pool.block_size
        usable = (sequence.num_tokens - 1) // size
        blocks = self._pool.match(sequence.hashes(size)[:usable])
        self._drafted[sequence.seq_id] = drafted = _Drafted(blocks, len(blocks) * size)
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
        """The blocks that earlier steps have filled."""
        full = drafted.num_computed // self._pool.block_size
        if self._pool.prefix_caching and full > drafted.num_registered:
            hashes = sequence.hashes(self._pool.block_size)
            for index in range(drafted.num_registered, full):
                self._pool.register(drafted.block_table[index], hashes[index])
        drafted.num_registered = full


@dataclass(slots=True)
class _Drafted:
    """What a draft model has of a sequence: KV of its tokens `[0, num_computed)`."""

    block_table: list[int]
    num_computed: int
    num_registered: int = 0  # blocks
    num_known: int | None = None  # blocks that the ranks know; None: they know nothing of it

    def delta(self, sequence: Sequence, count: int, num_drafts: int) -> SequenceDelta:
        """The next `count` tokens, and so many guesses after them."""
        start, known, params = self.num_computed, self.num_known, sequence.sampling
        new = None
        if known is None:
            # No word of ends and log-probabilities: a guess needs neither.
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
            num_blocks=known or 0,
            new_block_ids=tuple(self.block_table[known or 0 :]),
            samples=num_drafts > 0,
            new=new,
            num_drafts=num_drafts,
        )
