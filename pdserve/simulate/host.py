"""The cores that simulated nodes compute on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(slots=True, eq=False)
class Turn:
    """Work in progress on a `Host`."""

    left: float  # seconds of work, at `Host._at`, if it ran alone
    beside: float  # its slowdown while others compute
    ended: Callable[[], None]


class Host:
    """Runs steps side by side. If they are more than the host has room for, each gets an equal
    share of all cores (processor sharing, Kleinrock 1967)."""

    def __init__(self, places: float = inf) -> None:
        """`places`: the number of steps that can have their own cores at once."""
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._turns: list[Turn] = []  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, beside: float, ended: Callable[[], None]) -> Turn:
        """Runs a step that takes `seconds` alone and `beside` times as long beside others, then
        calls `ended`."""
        self._pass()
        turn = Turn(seconds, beside, ended)
        self._turns.append(turn)
        self._arm()
        return turn

    def left(self, turn: Turn) -> float:
        """Returns the remaining seconds of a step, if it ran alone."""
        self._pass()
        return turn.left

    def shorten(self, turn: Turn, seconds: float) -> None:
        """Takes work away."""
        self._pass()
        turn.left -= seconds
        self._arm()

    def _speed(self, turn: Turn) -> float:
        running = len(self._turns)
        share = min(1.0, self._places / running)
        return share if running == 1 else share / turn.beside

    def _pass(self) -> None:
        now = self._loop.time()
        if passed := now - self._at:
            for turn in self._turns:
                turn.left -= passed * self._speed(turn)
            self._at = now

    def _next(self) -> tuple[float, Turn]:
        return min(((each.left / self._speed(each), each) for each in self._turns), key=_first)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            self._timer = self._loop.call_at(self._at + max(0.0, self._next()[0]), self._end)

    def _end(self) -> None:
        self._timer = None
        self._pass()
        _, turn = self._next()
        self._turns.remove(turn)
        self._arm()
        turn.ended()


def _first(pair: tuple[float, Turn]) -> float:
    return pair[0]
