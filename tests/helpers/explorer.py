"""Explores the orders of the hand-off's events, with a limited number of out-of-turn choices.

A run starts from the beginning and takes the first option, the oldest one, at every step. Each
option not taken becomes the start of another run, which continues in turn from there; the events
that it overtook wait until no others are left. A run that reaches a known state ends. So a
violation is found with the fewest choices that lead to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from handoff.promises import Promise, Violation
from handoff.world import Setting, World

DRIVERS = logging.getLogger("pdserve.kv_transfer.control")
MOST_STEPS = 300


@dataclass(frozen=True)
class Report:
    states: int
    runs: int
    outcomes: frozenset[str]


class Defects(logging.Handler):
    """Collects log records of unexpected errors in a driver."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(repr(record.exc_info and record.exc_info[1]))


@contextmanager
def heard() -> Iterator[list[str]]:
    """Suppresses warnings; yields the list of logged defects."""
    defects = Defects()
    DRIVERS.addHandler(defects)
    DRIVERS.propagate = False
    try:
        yield defects.found
    finally:
        DRIVERS.propagate = True
        DRIVERS.removeHandler(defects)


class Explorer:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._seen: dict[int, int] = {}  # state → most choices left when it was reached
        self._outcomes: set[str] = set()
        self._defects: list[str] = []
        self._runs = 0

    def run(self, choices: int, most_runs: int | None = None) -> Report:
        """Explores runs with at most `choices` choices each.

        Raises:
            Violation: a promise is broken; the message has the steps.
        """
        waiting: deque[tuple[int, ...]] = deque([()])
        with heard() as self._defects:
            while waiting and self._runs != most_runs:
                self._runs += 1
                waiting.extend(self._follow(waiting.popleft(), choices))
        return Report(len(self._seen), self._runs, frozenset(self._outcomes))

    def _follow(self, path: tuple[int, ...], choices: int) -> list[tuple[int, ...]]:
        """Runs along `path`, then in turn. Returns the paths that branch off after `path`."""
        left = choices - sum(map(bool, path))
        world, story, others = World(self._setting), [], []
        try:
            for number in range(MOST_STEPS):
                options = world.options()
                if number >= len(path) and self._was_here(world.fingerprint(options), left):
                    return others
                taken = path[number] if number < len(path) else 0
                if taken >= len(options) or (options[taken].cost and not taken):
                    break
                if number >= len(path) and left:
                    turn = (*path, *[0] * (number - len(path)))
                    others += [(*turn, other) for other in range(1, len(options))]
                for option in options[:taken]:
                    option.late += 1
                story.append(options[taken].label)
                world.step(options[taken])
                if self._defects:
                    raise Violation(Promise.NO_DEFECT, self._defects.pop())
            world.check_end()
        except Violation as violation:
            violation.trace = (*story, f"✗ {violation}")
            raise
        finally:
            _forget(world)
        self._outcomes.add(world.given)
        return others

    def _was_here(self, fingerprint: tuple[Any, ...], left: int) -> bool:
        state = hash(fingerprint)
        if self._seen.get(state, -1) >= left:
            return True
        self._seen[state] = left
        return False


def _forget(world: World) -> None:
    """Cancels the world's tasks without log lines."""
    for task in asyncio.all_tasks(world.loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
