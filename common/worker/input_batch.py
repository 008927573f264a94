"""A step in the form that a rank computes, and a rank's memory of sequences between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from pdserve.common.core.errors import NodeError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.messages import DRAWN, NewSequence, SequenceDelta, StepDelta
from pdserve.common.model.attention import BlockIds
from pdserve.common.model.staging import upload
from pdserve.common.worker.grammar import Grammars, Mask, RowGrammar
from pdserve.common.worker.token_feed import TokenFeed


@dataclass(frozen=True, slots=True)
class StepSequence:
    """One sequence's part of a step: `token_ids` are at positions `start … start+len(token_ids)-1`,
    followed by `drafts`. The KV of all goes into the blocks of `block_tables`, one per KV group."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_tables: Sequence[Sequence[int] | BlockIds]
    sampling: SamplingParams | None = None  # None: a chunk before the last, which samples nothing
    counts: TokenCounts | None = None  # of prompt + output so far, only if sampling.penalised
    banned_token_ids: tuple[int, ...] = ()  # forbidden by min_tokens or bad_words
    seed: int = 0
    drafts: tuple[int, ...] = ()
    drafts_banned: tuple[tuple[int, ...], ...] = ()  # `banned_token_ids` after each draft
    grammar: RowGrammar | None = None  # excludes drafts
    mask: Mask | None = None  # tokens that the grammar allows
    scored: tuple[int, ...] = ()  # prompt tokens to score, which follow each of `token_ids`
    num_top: int = 0  # alternatives per scored token
    adapter: str = ""  # digest of its LoRA adapter

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return len(self.token_ids) + len(self.drafts)

    @property
    def rows(self) -> tuple[StepSequence, ...]:
        """One sequence per token to sample: after `token_ids`, and after each draft as if it were
        one of them. The first of a row's `drafts` is the draft for the token it samples."""
        if not self.drafts:
            return (self,)
        banned = (self.banned_token_ids, *self.drafts_banned)
        return tuple(
            replace(
                self,
                token_ids=self.token_ids + self.drafts[:count],
                drafts=self.drafts[count:],
                banned_token_ids=banned[count],
                drafts_banned=banned[count + 1 :],
            )
            for count in range(len(self.drafts) + 1)
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass."""

    step: int
    sequences: tuple[StepSequence, ...]


class TokenCounts:
    """Whether each token occurs in a sequence's prompt (`prompt`, bool `[vocab]`) and how often in
    its output (`output`, float32 `[vocab]`)."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(vocab_size, device=device)

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> TokenCounts:
        counts = cls(vocab_size)
        counts.add(prompt, output)
        return counts

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Adds tokens of the prompt and of the output."""
        if prompt:
            self.prompt[self._ids(prompt)] = True
        if output:
            ids = self._ids(output)
            self.output.scatter_add_(0, ids, torch.ones_like(ids, dtype=self.output.dtype))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(tokens), self.output.device)


class BadWords:
    """Finds the tokens that would complete a bad word. A step costs one look-up per distinct word
    length, independent of the number of words."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: token ids of each word, at least one."""
        self._last: dict[tuple[int, ...], list[int]] = {}  # earlier tokens → last tokens
        for word in words:
            self._last.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._last})
        self._recent: tuple[int, ...] = ()  # the last tokens, as many as the longest word needs

    def add(self, output: Sequence[int]) -> None:
        """Adds tokens of the output."""
        if longest := self._lengths[-1] if self._lengths else 0:
            self._recent = (*self._recent, *output[-longest:])[-longest:]

    def banned(self) -> tuple[int, ...]:
        start = len(self._recent)
        found = [self._last.get(self._recent[start - n :], ()) for n in self._lengths if n <= start]
        return tuple(chain.from_iterable(found))


class InputBatch:
    """A rank's memory of its sequences, so that steps only contain what is new.

        StepDelta ──apply──▶ StepBatch

    It has the sequences that the scheduler runs, and those that have ended since the last step. A
    delta that does not continue what the rank has seen is rejected, because a missed step or a
    scheduler error would give wrong tokens.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        samples: bool,
        grammars: Grammars | None = None,
        feed: TokenFeed | None = None,
    ) -> None:
        """Only a rank that `samples` counts tokens, on its `device`, and needs `grammars`. Without
        a `feed` every step must have the tokens of the one before."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._samples = samples
        self._grammars = grammars
        self._feed = feed
        self._states: dict[int, _SequenceState] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, delta: StepDelta) -> StepBatch:
        """Returns the complete step. Its block tables and counts are valid until the next call.

        Raises:
            NodeError: STEP_MISSED, `delta` does not continue what the rank knows.
        """
        if delta.step != self._step + 1:
            raise _step_missed(f"step {delta.step} came after step {self._step}")
        self._step = delta.step
        for seq_id in delta.ended:
            if (state := self._states.pop(seq_id, None)) is not None:
                state.close()
        return StepBatch(delta.step, tuple(map(self._advance, delta.sequences)))

    def _advance(self, delta: SequenceDelta) -> StepSequence:
        if delta.new is not None:
            self._states[delta.seq_id] = self._begin(delta.new, delta.start, len(delta.num_blocks))
        state = self._states.get(delta.seq_id)
        if state is None:
            raise _step_missed(f"sequence {delta.seq_id} was never begun")
        try:
            return state.advance(delta, self._block_size, self._feed)
        except ValueError as error:
            raise _step_missed(f"sequence {delta.seq_id}: {error}") from None

    def _begin(self, new: NewSequence, start: int, num_groups: int) -> _SequenceState:
        if not (self._samples and new.sampling.needs_history):
            return _SequenceState(new, start, num_groups, None)
        if len(new.history) < start:
            raise _step_missed("a sequence that needs its history came without it")
        history = _History(new.sampling, self._vocab_size, self._device, self._grammars)
        history.add(new.history[: new.num_prompt_tokens], new.history[new.num_prompt_tokens :])
        return _SequenceState(new, start, num_groups, history)


class _History:
    """The state that sampling needs of earlier tokens: counts, bad words, grammar."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars | None,
    ) -> None:
        self.counts = TokenCounts(vocab_size, device) if params.penalised else None
        self.words = BadWords(params.bad_words_token_ids)
        self.grammar: RowGrammar | None = None
        if params.grammar:
            assert grammars is not None, "a rank that samples has grammars"
            self.grammar = grammars.begin(params.grammar)

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self.counts is not None:
            self.counts.add(prompt, output)
        self.words.add(output)
        if self.grammar is not None:
            self.grammar.advance(output)

    def add_drawn(self, seq_id: int, feed: TokenFeed) -> None:
        """Adds the last step's token, which the host may not know: the scheduler asks for that only
        without bad words and grammars."""
        if self.counts is not None:
            feed.count(seq_id, self.counts.output)


class _SequenceState:
    """A rank's state of one sequence."""

    def __init__(
        self, new: NewSequence, start: int, num_groups: int, history: _History | None
    ) -> None:
        self._new = new
        self._next = start  # first position that no step has computed
        self._num_drafts = 0  # draft positions after it, of which the next step may skip some
        self._tables = [_BlockTable() for _ in range(num_groups)]
        self._history = history
        self._num_known = len(new.history)

    def close(self) -> None:
        if self._history is not None and self._history.grammar is not None:
            self._history.grammar.close()

    def advance(
        self, delta: SequenceDelta, block_size: int, feed: TokenFeed | None
    ) -> StepSequence:
        """Applies a delta; raises ValueError if it does not continue the sequence."""
        drawn = delta.token_ids == (DRAWN,)
        if drawn and (feed is None or delta.seq_id not in feed or self._new.sampling.needs_host):
            raise ValueError("the last step has no token that it could continue with")
        self._next -= delta.again
        if not self._next <= delta.start <= self._next + self._num_drafts:
            raise ValueError(f"its step begins at {delta.start}, the last ended at {self._next}")
        self._next, self._num_drafts = delta.start + len(delta.token_ids), delta.num_drafts
        end = self._next + self._num_drafts
        for table, before, new in zip(
            self._tables, delta.num_blocks, delta.new_block_ids, strict=True
        ):
            if before != len(table):
                raise ValueError(f"it has {before} blocks, {len(table)} are known")
            table.extend(new)
            if end > len(table) * block_size:
                raise ValueError(f"{len(table)} blocks do not hold {end} tokens")
        self._remember(delta, feed)
        return StepSequence(
            seq_id=delta.seq_id,
            token_ids=delta.token_ids,
            start=delta.start,
            block_tables=[table.blocks for table in self._tables],
            sampling=self._new.sampling if delta.samples else None,
            counts=None if self._history is None else self._history.counts,
            banned_token_ids=self._banned() if delta.samples else (),
            seed=self._new.seed,
            drafts=delta.drafts,
            drafts_banned=tuple([self._banned(1 + i) for i in range(len(delta.drafts))]),
            grammar=None if self._history is None else self._history.grammar,
            scored=delta.scored,
            num_top=self._new.sampling.prompt_logprobs or 0,
            adapter=self._new.adapter,
        )

    def _remember(self, delta: SequenceDelta, feed: TokenFeed | None) -> None:
        """Adds the tokens that were sampled after the history was sent."""
        if self._history is None or self._next <= self._num_known:
            return
        if feed is not None and delta.token_ids == (DRAWN,):
            self._history.add_drawn(delta.seq_id, feed)
        else:
            self._history.add((), delta.token_ids[self._num_known - delta.start :])
        self._num_known = self._next

    def _banned(self, ahead: int = 0) -> tuple[int, ...]:
        """Returns the banned tokens for the next position, or `ahead` positions later (drafts,
        which exclude a history)."""
        num_output_tokens = self._next + ahead - self._new.num_prompt_tokens
        may_end = num_output_tokens >= self._new.sampling.min_tokens
        bans = () if may_end else self._new.min_tokens_bans
        return bans if self._history is None else bans + self._history.words.banned()


class _BlockTable:
    """A growing array of block ids."""

    def __init__(self) -> None:
        self._ids = np.empty(16, np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> BlockIds:
        """A view of the current ids; later appends do not change it."""
        return self._ids[: self._length]

    def extend(self, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        length = self._length + len(block_ids)
        if length > len(self._ids):
            grown = np.empty(max(length, 2 * len(self._ids)), np.int64)
            grown[: self._length] = self.blocks
            self._ids = grown
        self._ids[self._length : length] = block_ids
        self._length = length


def _step_missed(what: str) -> NodeError:
    return NodeError(f"this rank missed a step: {what}", code="STEP_MISSED")
