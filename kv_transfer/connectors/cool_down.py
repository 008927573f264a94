"""What failed a moment ago and should not be the first to be tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

COOL_DOWN_S = 30.0


class CoolDown:
    """Remembers keys for `COOL_DOWN_S` seconds each. Not thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until: dict[Hashable, float] = {}

    def add(self, keys: Collection[Hashable]) -> bool:
        """Their time begins (again). Whether any of them is new here."""
        now = self._now()
        self._until = {key: until for key, until in self._until.items() if until > now}
        news = any(key not in self._until for key in keys)
        self._until.update(dict.fromkeys(keys, now + COOL_DOWN_S))
        return news

    def __contains__(self, key: Hashable) -> bool:
        return self._until.get(key, 0.0) > self._now()
