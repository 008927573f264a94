"""A step's rows and their grammars' masks.

No step waits for a grammar while it has a result for anybody else: a row that is not ready, or
whose turn would take the step too long, is *deferred*, draws nothing and comes again in the next
step. Its tokens are the same, whenever they are drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from time import monotonic

from pdserve.common.core.errors import PdserveError
from pdserve.common.text.grammar import GrammarError
from pdserve.common.worker.grammar import RowGrammar
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.sampler import FailedRow

logger = logging.getLogger(__name__)

DEAR = 0.001  # seconds that a mask of a dear grammar takes
SHARE = 4  # of the time that steps take, one part at most goes to dear masks
STEP_SECONDS, ROW_SECONDS = 0.005, 0.000_05  # that all masks of a step may take
_WAIT = 0.05  # seconds that a step waits which has nothing else to do


class MaskTurns:
    """Whose masks a step computes. Ordinary ones take tens of microseconds. Dear ones take turns,
    and are rare enough to slow others by a third at most."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._next_dear = 0.0

    def take(
        self, rows: Sequence[StepSequence], alone: bool
    ) -> tuple[dict[int, StepSequence | FailedRow], list[int]]:
        """The rows with their masks, or why there is none, by their places; and the seq_ids of
        those that are deferred. `alone`: the step has nothing for anybody else."""
        done: dict[int, StepSequence | FailedRow] = {
            place: row for place, row in enumerate(rows) if row.grammar is None
        }
        grammars = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
        if alone and not done:
            _wait_for_one(list(grammars.values()))
        deferred = []
        start = self._now()
        end = start + STEP_SECONDS + ROW_SECONDS * len(rows)
        # The dear ones last, and of these the one that has had least: who defers others shall be
        # deferred.
        order = sorted(grammars, key=lambda i: (_is_dear(grammars[i]), grammars[i].seconds))
        for place in order:
            grammar = grammars[place]
            dear = _is_dear(grammar)
            others = not alone or len(done) > 0
            turn = self._now() < end and not (dear and others and start < self._next_dear)
            masked = _masked(rows[place]) if turn else None
            if turn and _is_dear(grammar):
                self._next_dear = self._now() + (SHARE - 1) * grammar.last_seconds
                end = 0.0
            if masked is None:
                deferred.append(rows[place].seq_id)
            else:
                done[place] = masked
        return dict(sorted(done.items())), deferred


def _is_dear(grammar: RowGrammar) -> bool:
    return grammar.last_seconds > DEAR


def _masked(row: StepSequence) -> StepSequence | FailedRow | None:
    assert row.grammar is not None
    try:
        mask = row.grammar.mask()
    except GrammarError as error:
        return FailedRow(f"its grammar has failed: {error}", forbidden=True)
    except Exception as error:  # of the thread that compiles
        logger.exception("sequence %d has no mask", row.seq_id)
        what = str(error) if isinstance(error, PdserveError) else type(error).__name__
        return FailedRow(f"its grammar failed: {what}")
    if mask is None:
        return None
    # What min_tokens forbids is all that a complete text leaves.
    banned = () if row.grammar.complete else row.banned_token_ids
    return replace(row, mask=mask, banned_token_ids=banned)


def _wait_for_one(grammars: Sequence[RowGrammar]) -> None:
    waiting = [each.waits_for for each in grammars if each.waits_for is not None]
    if len(waiting) == len(grammars):
        wait(waiting, timeout=_WAIT, return_when=FIRST_COMPLETED)
