"""Speculative decoding: drafts the next tokens and verifies several in one step.

    n tokens, one pending ──draft──▶ k drafts ──one step of k + 1 queries──▶ k + 1 sampled tokens
    kept: those up to and including the first that differs from its draft

A decode step reads all weights for one token per sequence; k + 1 tokens cost little more. The step
computes logits after the pending token and after each draft, and samples a token from each exactly
as without drafts: with the sequence's parameters and the random number of (seed, position). If the
sampled token equals the draft, the next position's logits are valid too; after the first difference
the rest is discarded. So the output is, token for token, the same as without drafts, greedy or not,
for any drafter, and also after a continuation on a node with another drafter or none
(drafter-invariant speculative decoding, arXiv:2408.07978). Rounding may differ, as between any two
batches.

Rejection sampling (Leviathan et al., ICML 2023, arXiv:2211.17192) also keeps the distribution, but
its tokens depend on the drafts, so another node could not continue a stream with the same tokens.
Its acceptance probability, Σ min(p, q) for a drafter with distribution q and the model's p, is
optimal. Ours is p(draft) for a deterministic drafter such as n-grams, which is equal. For a draft
model, which samples with the same random numbers, it is the overlap of the two cumulative
distributions: equal for greedy sampling, 1 for p = q, otherwise lower, because a difference shifts
the tokens after it.

KV of drafts goes into the slots after the sequence's tokens. KV of rejected drafts is overwritten
by the next step before it is read, and is never part of a block hash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.messages import SequenceDelta
from pdserve.common.engine.sequence import Sequence


class Draft(NamedTuple):
    """Draft tokens of a sequence."""

    size: int
    token_ids: tuple[int, ...] = ()  # empty: the ranks' draft model makes them


NO_DRAFT = Draft(0)


class Speculator(ABC):
    """Proposes draft tokens to the scheduler."""

    def __init__(self, config: Speculation, max_model_len: int) -> None:
        self.config = config
        self._max_len = max_model_len
        # Totals since start.
        self.num_drafts = 0  # drafts verified
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos = [0] * config.num_speculative_tokens

    def budget(self, running: Iterable[Sequence], tokens: int) -> int:
        """Returns how many draft tokens a step of `tokens` tokens may verify besides one token per
        running sequence; half of the rest if prompts are waiting."""
        left, prompts = tokens, False
        for each in running:
            left -= 1
            prompts |= each.num_unscheduled > 0 and not each.decodes
        return left // 2 if prompts else left

    def propose(
        self, sequence: Sequence, pool: KVPool, running: int, budget: int, free: int
    ) -> Draft:
        """Returns up to `budget` draft tokens for one of `running` sequences and allocates slots
        for them, leaving one of `free` blocks for each other running sequence."""
        spare = max(0, free - running)
        slots = (len(sequence.block_tables[0]) + spare) * pool.block_size - sequence.num_tokens
        most = min(self._useful(sequence, running), budget, slots)
        draft = self.draft(sequence, most) if most > 0 else NO_DRAFT
        pool.grow(sequence, sequence.num_tokens + draft.size)
        return draft

    def _useful(self, sequence: Sequence, running: int) -> int:
        """Returns how many drafts can be useful; the step samples one token more."""
        limit = self.config.disable_by_batch_size
        if not sequence.sampling.speculates or (limit is not None and running > limit):
            return 0
        wanted = sequence.sampling.max_tokens - sequence.num_output_tokens
        wanted = min(wanted, self._max_len - sequence.num_tokens)
        return min(self.config.num_speculative_tokens, wanted - 1)

    @abstractmethod
    def draft(self, sequence: Sequence, most: int) -> Draft:
        """Returns up to `most` draft tokens of a decoding sequence."""

    def drafting(self) -> tuple[SequenceDelta, ...]:
        """Returns a draft model's work for the drafts since the last call."""
        return ()

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Records how many of the drafts were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_pos[position] += 1

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence that has ended or was preempted."""
