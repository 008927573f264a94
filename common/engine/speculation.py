"""Speculative decoding: guesses of the next tokens, which one step verifies together.

    n tokens, one pending ──draft──▶ k guesses ──one step of k + 1 queries──▶ k + 1 drawn tokens
    kept: those up to the first that is not the guess, that one included

A decode step reads all weights for one token a sequence; k + 1 tokens cost it little more. The step
computes logits after the pending token and after each guess, and draws a token from each *as it
would have been drawn anyhow*: with the sequence's parameters and the random number of (seed,
position). If the drawn token is the guess, the logits of the next position are those of the true
continuation, and what is drawn there counts, too; at the first other token the rest is void. So
the output is, token for token, what is drawn without guesses, greedy or not, whoever guesses and
however badly, and a continuation on a node with another drafter, or none, is the same
(drafter-invariant speculative decoding, arXiv:2408.07978). Rounding may differ, as between any two
batches.

Rejection sampling (Leviathan et al., ICML 2023, arXiv:2211.17192) keeps the distribution, too, but
there the tokens depend on the guesses: a node that takes over in mid-stream would go on otherwise.
It accepts a guess of a drafter that draws from q with probability Σ min(p, q), p being the model's,
which is the most that is possible. Here it is p(guess) for a guess that is certain, as an n-gram's,
which is the same; and for a draft model, which draws with the same random numbers, the overlap of
the two cumulative distributions: 1 where p = q, equal where both are greedy, else less, because the
tokens behind a difference are shifted by it.

KV of guesses goes into the slots behind the sequence's tokens. Where they were wrong it is
overwritten by the next step, before anybody reads it; it is never part of a hash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import SequenceDelta
from pdserve.common.engine.sequence import Sequence


class Draft(NamedTuple):
    """Guesses of what follows a sequence."""

    size: int
    token_ids: tuple[int, ...] = ()  # none: the ranks' draft model makes them


NO_DRAFT = Draft(0)


class Speculator(ABC):
    """What a scheduler asks for guesses."""

    def __init__(self, config: Speculation, max_model_len: int) -> None:
        self.config = config
        self._max_len = max_model_len
        # Totals since start.
        self.num_drafts = 0  # times that something was guessed
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos = [0] * config.num_speculative_tokens

    def budget(self, running: Iterable[Sequence], tokens: int) -> int:
        """Guesses that a step of so many tokens verifies, beside a token of each that runs;
        prompts that wait are left half of the rest."""
        left, prompts = tokens, False
        for each in running:
            left -= 1
            prompts |= each.num_unscheduled > 0 and not each.decodes
        return left // 2 if prompts else left

    def guess(self, sequence: Sequence, pool: BlockPool, running: int, budget: int) -> Draft:
        """At most so many guesses for one of so many that run, with slots for them in its blocks;
        none takes the block that another one may need next."""
        spare = max(0, pool.num_free - running)
        slots = (len(sequence.block_table) + spare) * pool.block_size - sequence.num_tokens
        most = min(self._useful(sequence, running), budget, slots)
        draft = self.draft(sequence, most) if most > 0 else NO_DRAFT
        needed = pool.blocks_for(sequence.num_tokens + draft.size)
        if (more := needed - len(sequence.block_table)) > 0:
            sequence.block_table += pool.allocate(more)
        return draft

    def _useful(self, sequence: Sequence, running: int) -> int:
        """How many guesses may be of use: the step draws one token more."""
        limit = self.config.disable_by_batch_size
        if not sequence.sampling.speculates or (limit is not None and running > limit):
            return 0
        wanted = sequence.sampling.max_tokens - sequence.num_output_tokens
        wanted = min(wanted, self._max_len - sequence.num_tokens)
        return min(self.config.num_speculative_tokens, wanted - 1)

    @abstractmethod
    def draft(self, sequence: Sequence, most: int) -> Draft:
        """At most so many guesses of what follows the tokens of one that decodes."""

    def drafting(self) -> tuple[SequenceDelta, ...]:
        """What a draft model has to do for the drafts since the last call."""
        return ()

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of the guesses were right; those tokens are the sequence's now."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_pos[position] += 1

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """It is computed no more, or from its beginning."""
