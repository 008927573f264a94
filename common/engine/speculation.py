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

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.ngram import NGramIndex
from pdserve.common.engine.sequence import Sequence


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

    def most(self, sequence: Sequence, running: int) -> int:
        """Guesses for it that may be of use, while so many sequences run."""
        limit = self.config.disable_by_batch_size
        if not sequence.sampling.speculates or (limit is not None and running > limit):
            return 0
        wanted = sequence.sampling.max_tokens - sequence.num_output_tokens
        wanted = min(wanted, self._max_len - sequence.num_tokens)
        return min(self.config.num_speculative_tokens, wanted - 1)

    @abstractmethod
    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most so many guesses of what follows its tokens."""

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


class PromptLookup(Speculator):
    """Guesses that what followed the last tokens before follows them again (prompt lookup): in
    summaries, code and repetition it often does. Costs microseconds, here beside the scheduler."""

    def __init__(self, config: Speculation, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._indexes: dict[int, NGramIndex] = {}  # by seq_id

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        index = self._indexes.get(sequence.seq_id)
        if index is None:
            shortest, longest = self.config.prompt_lookup_min, self.config.prompt_lookup_max
            index = self._indexes[sequence.seq_id] = NGramIndex(shortest, longest)
        index.extend(sequence.token_ids)
        return index.continuation(sequence.token_ids, most)

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.seq_id, None)


def make_speculator(config: Speculation | None, max_model_len: int) -> Speculator | None:
    """None: nothing is guessed."""
    if config is None:
        return None
    return PromptLookup(config, max_model_len)
