"""What a rank remembers of the sequences it computes, so that a step need only tell what is new.

    StepDelta ──apply──▶ StepBatch

A delta that does not continue what the rank has seen is refused: the rank missed a step, or the
scheduler is wrong. Either way its next token would be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.common.core.errors import NodeError
from pdserve.common.engine.messages import NewSequence, SequenceDelta, StepDelta
from pdserve.common.model.attention import BlockIds
from pdserve.common.worker.batch import StepBatch, StepSequence, TokenCounts


class KnownSequences:
    """As many as the scheduler runs, and those that have ended since the last step."""

    def __init__(
        self, block_size: int, vocab_size: int, device: torch.device, samples: bool
    ) -> None:
        """Only a rank that `samples` counts tokens; they are counted on its `device`."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._samples = samples
        self._known: dict[int, _Known] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, delta: StepDelta) -> StepBatch:
        """The whole of a step. Its block tables and counts are good until the next call.

        Raises:
            NodeError: STEP_MISSED, `delta` does not continue what was there.
        """
        if delta.step != self._step + 1:
            raise _missed(f"step {delta.step} came after step {self._step}")
        self._step = delta.step
        for seq_id in delta.ended:
            self._known.pop(seq_id, None)
        return StepBatch(delta.step, tuple(map(self._continue, delta.sequences)))

    def _continue(self, delta: SequenceDelta) -> StepSequence:
        if delta.new is not None:
            self._known[delta.seq_id] = self._begin(delta.new, delta.start)
        known = self._known.get(delta.seq_id)
        if known is None:
            raise _missed(f"sequence {delta.seq_id} was never begun")
        try:
            return known.continued(delta, self._block_size)
        except ValueError as error:
            raise _missed(f"sequence {delta.seq_id}: {error}") from None

    def _begin(self, new: NewSequence, start: int) -> _Known:
        if not (self._samples and new.sampling.penalised):
            return _Known(new, start, None)
        if len(new.history) < start:
            raise _missed("a sequence with penalties came without its history")
        counts = TokenCounts(self._vocab_size, self._device)
        counts.add(new.history[: new.num_prompt_tokens], new.history[new.num_prompt_tokens :])
        return _Known(new, start, counts)


class _Known:
    """One sequence, as far as steps have told of it."""

    def __init__(self, new: NewSequence, start: int, counts: TokenCounts | None) -> None:
        self._new = new
        self._next = start  # the first position that no step has taken
        self._table = _BlockTable()
        self._counts = counts
        self._num_counted = len(new.history)

    def continued(self, delta: SequenceDelta, block_size: int) -> StepSequence:
        """Raises ValueError if there is a gap."""
        if delta.start != self._next:
            raise ValueError(f"its step begins at {delta.start}, the last ended at {self._next}")
        if delta.num_blocks != len(self._table):
            raise ValueError(f"it has {delta.num_blocks} blocks, {len(self._table)} are known")
        self._next += len(delta.token_ids)
        self._table.extend(delta.new_block_ids)
        if self._next > len(self._table) * block_size:
            raise ValueError(f"{len(self._table)} blocks do not hold {self._next} tokens")
        self._count(delta)
        return StepSequence(
            seq_id=delta.seq_id,
            token_ids=delta.token_ids,
            start=delta.start,
            block_table=self._table.blocks,
            sampling=self._new.sampling if delta.samples else None,
            counts=self._counts,
            banned_token_ids=self._banned() if delta.samples else (),
            seed=self._new.seed,
        )

    def _count(self, delta: SequenceDelta) -> None:
        """The tokens that the history did not have: they were drawn after it."""
        if self._counts is None or self._next <= self._num_counted:
            return
        self._counts.add((), delta.token_ids[self._num_counted - delta.start :])
        self._num_counted = self._next

    def _banned(self) -> tuple[int, ...]:
        num_output_tokens = self._next - self._new.num_prompt_tokens
        may_end = num_output_tokens >= self._new.sampling.min_tokens
        return () if may_end else self._new.min_tokens_bans


class _BlockTable:
    """Block ids that grow in place."""

    def __init__(self) -> None:
        self._ids = np.empty(16, np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> BlockIds:
        """What is there now, whatever is appended later."""
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


def _missed(what: str) -> NodeError:
    return NodeError(f"this rank missed a step: {what}", code="STEP_MISSED")
