"""Schedules the grammar masks of a step's rows.

A step with other rows does not wait for a grammar: a row whose mask is not ready, or would take too
long, is *deferred*. It samples nothing and is scheduled again in the next step, which does not
change its tokens.
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

SLOW = 0.001  # seconds per mask from which a grammar counts as slow
SHARE = 4  # slow masks take at most 1 / SHARE of the time
STEP_SECONDS, ROW_SECONDS = 0.005, 0.000_05  # time limit of a step's masks: per step, per row
_WAIT = 0.05  # seconds to wait in a step without other rows


class MaskScheduler:
    """Chooses the masks that a step computes. Normal ones take tens of microseconds. Slow ones are
    computed one per step and so rarely that they slow other rows by at most a third."""

    def __init__(self, now: Callable[[], float] = monotonic, defers: bool = True) -> None:
        """Without `defers` every step waits for the masks of all its rows."""
        self._now = now
        self._defers = defers
        self._next_slow = 0.0

    def take(
        self, rows: Sequence[StepSequence], alone: bool
    ) -> tuple[dict[int, StepSequence | FailedRow], list[int]]:
        """Returns (place → row with its mask, or its failure; seq_ids of deferred rows). `alone`:
        the step has no sequences besides these rows."""
        done: dict[int, StepSequence | FailedRow] = {
            place: row for place, row in enumerate(rows) if row.grammar is None
        }
        grammars = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
        if alone and not done:
            _wait_for_one(list(grammars.values()))
        deferred = []
        start = self._now()
        end = start + STEP_SECONDS + ROW_SECONDS * len(rows)
        # Slow grammars last; among them the one that has used the least time first.
        order = sorted(grammars, key=lambda i: (_is_slow(grammars[i]), grammars[i].seconds))
        for place in order:
            grammar = grammars[place]
            slow = _is_slow(grammar)
            others = not alone or len(done) > 0
            now = self._now() < end and not (slow and others and start < self._next_slow)
            masked = _masked(rows[place]) if now or not self._defers else None
            while masked is None and not self._defers:
                masked = _masked_later(rows[place])
            if now and _is_slow(grammar):
                self._next_slow = self._now() + (SHARE - 1) * grammar.last_seconds
                end = 0.0
            if masked is None:
                deferred.append(rows[place].seq_id)
            else:
                done[place] = masked
        return dict(sorted(done.items())), deferred


def _is_slow(grammar: RowGrammar) -> bool:
    return grammar.last_seconds > SLOW


def _masked(row: StepSequence) -> StepSequence | FailedRow | None:
    assert row.grammar is not None
    try:
        mask = row.grammar.mask()
    except GrammarError as error:
        return FailedRow(f"its grammar has failed: {error}", forbidden=True)
    except Exception as error:  # e.g. raised on the compiling thread
        logger.exception("sequence %d has no mask", row.seq_id)
        what = str(error) if isinstance(error, PdserveError) else type(error).__name__
        return FailedRow(f"its grammar failed: {what}")
    if mask is None:
        return None
    # A complete text allows only end tokens, so min_tokens must not ban them.
    banned = () if row.grammar.complete else row.banned_token_ids
    return replace(row, mask=mask, banned_token_ids=banned)


def _masked_later(row: StepSequence) -> StepSequence | FailedRow | None:
    """Tries once more, when the grammar is compiled."""
    assert row.grammar is not None
    if row.grammar.waits_for is not None:
        wait([row.grammar.waits_for])
    return _masked(row)


def _wait_for_one(grammars: Sequence[RowGrammar]) -> None:
    waiting = [each.waits_for for each in grammars if each.waits_for is not None]
    if len(waiting) == len(grammars):
        wait(waiting, timeout=_WAIT, return_when=FIRST_COMPLETED)
