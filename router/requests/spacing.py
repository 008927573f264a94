"""`--stream-interval`: fewer and larger deltas, which cost a router and its clients less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.router.requests.generation import Put, TextDelta, Update, join


class Spaced:
    """Holds deltas back: a choice's first one goes on at once, then those of `interval` tokens
    together, and what is left with its last one."""

    def __init__(self, put: Put, interval: int) -> None:
        self._put = put
        self._interval = interval
        self._held: dict[int, list[TextDelta]] = {}  # by choice, of those that have begun

    def __call__(self, update: Update) -> None:
        if not isinstance(update, TextDelta):
            self._put(update)
        elif (held := self._held.get(update.choice)) is None:
            self._held[update.choice] = []
            self._put(update)
        else:
            held.append(update)
            num_tokens = sum(len(each.tokens) for each in held)
            if update.finish_reason is not None or num_tokens >= self._interval:
                self._release(update.choice)

    def release(self) -> None:
        for choice in self._held:
            self._release(choice)

    def _release(self, choice: int) -> None:
        if held := self._held[choice]:
            self._held[choice] = []
            self._put(join(held))


@contextmanager
def spaced(put: Put, interval: int) -> Iterator[Put]:
    """Yields what puts updates in the place of `put`. A failure comes after the tokens before
    it."""
    held = Spaced(put, interval)
    try:
        yield held
    except Exception:
        held.release()
        raise
