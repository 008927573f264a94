"""The promises of the hand-off: what must never happen."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn


class Promise(StrEnum):
    ONE_OUTCOME = "the waiter gets the blocks or they are freed, once"
    ONE_FREE = "a source frees its blocks once"
    FREED_WHILE_READ = "a source's blocks are not freed while a rank may read them"
    GIVEN_WHILE_WRITTEN = "the sink's blocks are not given away while a rank may write into them"
    NO_LATE_WRITE = "a rank takes no write once the blocks are given away"
    NO_STALE_WRITE = "a rank takes no write of an old epoch"
    RIGHT_CONTENT = "activated are one commit's token and its source's undamaged data"
    ONE_HOLDER = "an epoch's ticket is in one source's hands"
    ONE_ANSWER = "each call to the sink is answered, once"
    STALE_IS_INERT = "what names an old epoch changes nothing"
    CANCEL_ENDS_IT = "a cancelled transfer is over"
    ONE_REPULL = "a source sends again once"
    HONEST_SUCCESS = "a source reports success only of what was activated"
    TERMINATION = "if only time passes, every party ends"
    SUCCESS = "while a party is left that can do the work, it is done"
    NO_DEFECT = "no driver raises an unexpected error"


class Violation(Exception):
    """A broken promise. `trace`: the steps that lead to it, set by the explorer."""

    def __init__(self, promise: Promise, detail: object) -> None:
        super().__init__(f"{promise.name}: {promise} ({detail})")
        self.promise = promise
        self.trace: tuple[str, ...] = ()


def broken(promise: Promise, detail: object) -> NoReturn:
    raise Violation(promise, detail)
