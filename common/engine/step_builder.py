"""Builds steps that contain only what the ranks' `InputBatch` (`input_batch.py`) does not know."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.messages import DRAWN, NewSequence, SequenceDelta, StepDelta
from pdserve.common.engine.sequence import Sequence
from pdserve.common.engine.speculation import NO_DRAFT, Draft


class StepBuilder:
    """Tracks what the ranks know of each running sequence."""

    def __init__(self, eos_token_ids: tuple[int, ...], windows: Iterable[int] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        self.step = 0  # number of the last step
        self.computed = StepShape.empty(windows)  # sum of all steps
        # seq_id → blocks that the ranks know, per KV group
        self._known_blocks: dict[int, tuple[int, ...]] = {}
        self._taken = 0  # entries so far
        self._again: set[int] = set()  # seq_ids whose next token was already computed
        self._ended: list[int] = []  # seq_ids that the ranks must forget

    def entry(self, sequence: Sequence, count: int, draft: Draft = NO_DRAFT) -> SequenceDelta:
        """Schedules the sequence's next `count` tokens and its draft, and returns its entry in the
        next step."""
        start, tables = sequence.num_scheduled, sequence.block_tables
        known = self._known_blocks.get(sequence.seq_id)
        sequence.num_scheduled += count
        sequence.last_taken = self._taken = self._taken + 1
        self._known_blocks[sequence.seq_id] = lengths = tuple(map(len, tables))
        before = known or (0,) * len(tables)
        new: tuple[tuple[int, ...], ...] = ((),) * len(tables)
        if lengths != before:
            new = tuple(tuple(each[count:]) for each, count in zip(tables, before, strict=True))
        again = sequence.seq_id in self._again
        self._again.discard(sequence.seq_id)
        return SequenceDelta(
            seq_id=sequence.seq_id,
            token_ids=tuple(sequence.token_ids[start : start + count]) or (DRAWN,),
            start=start,
            num_blocks=before,
            new_block_ids=new,
            samples=sequence.num_scheduled >= sequence.num_tokens,
            new=self._new(sequence) if known is None else None,
            drafts=draft.token_ids,
            num_drafts=draft.size,
            again=again,
            scored=sequence.scored(start, start + count),
        )

    def again(self, sequence: Sequence) -> None:
        """Unschedules the last token, which will be computed again."""
        sequence.num_scheduled -= 1
        self._again.add(sequence.seq_id)

    def forget(self, sequence: Sequence) -> None:
        """Has the ranks forget a sequence that has ended or was preempted."""
        self._again.discard(sequence.seq_id)
        if self._known_blocks.pop(sequence.seq_id, None) is not None:
            self._ended.append(sequence.seq_id)

    def build(
        self,
        decodes: SequenceOf[SequenceDelta],
        chunks: SequenceOf[SequenceDelta],
        drafting: tuple[SequenceDelta, ...],
    ) -> StepDelta:
        """Returns the next step with these entries."""
        self.step += 1
        entries = (*decodes, *chunks)
        ended, self._ended = tuple(self._ended), []
        self.computed.add_step(
            [each.start for each in decodes if not each.num_drafts],
            [
                (each.start, len(each.token_ids) + each.num_drafts)
                for each in (*(one for one in decodes if one.num_drafts), *chunks)
            ],
            sum(1 + each.num_drafts for each in entries if each.samples),
        )
        return StepDelta(self.step, entries, ended, drafting)

    def _new(self, sequence: Sequence) -> NewSequence:
        params = sequence.sampling
        return NewSequence(
            sampling=params,
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=params.seed + sequence.choice,
            min_tokens_bans=(*self.eos_token_ids, *params.stop_token_ids)
            if params.min_tokens
            else (),
            history=tuple(sequence.token_ids) if params.needs_history else (),
            adapter=sequence.adapter,
        )
