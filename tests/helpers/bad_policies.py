"""Policies that tests name as module:Class: each has a fault, except one."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from pdserve.router.cluster.policy import Policy


class Raises(Policy):
    def choose(self, request: Any, nodes: Any) -> Any:
        raise RuntimeError("this policy always raises")

    def placed(self, request: Any, node: Any) -> None:
        raise RuntimeError("and then again")


class Exits(Policy):
    """Raises what `except Exception` does not catch."""

    def choose(self, request: Any, nodes: Any) -> Any:
        raise SystemExit(3)

    def placed(self, request: Any, node: Any) -> None:
        raise asyncio.CancelledError


class Unspeakable(Policy):
    """Raises an error that cannot be shown."""

    def choose(self, request: Any, nodes: Any) -> Any:
        class Nameless(Exception):
            def __repr__(self) -> str:
                raise RuntimeError

        raise Nameless


class Forgets(Policy):
    """Changes what it was given to read."""

    uses_prefixes = True

    def choose(self, request: Any, nodes: Any) -> Any:
        request.cached.clear()


class Sleeps(Policy):
    def choose(self, request: Any, nodes: Any) -> Any:
        time.sleep(0.15)
        return next(nodes.by_load(), None)


class Absent(Policy):
    """Chooses an object that is not a node."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return SimpleNamespace(id="absent")


class Dead(Policy):
    """Returns a node that it remembered, which may have died."""

    def __init__(self) -> None:
        self.first: Any = None

    def choose(self, request: Any, nodes: Any) -> Any:
        self.first = self.first or next(nodes.by_id(""), None)
        return self.first


class Wordy(Policy):
    """Returns a node's name instead of the node."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return next(nodes.by_id("")).id


class NeedsMore(Policy):
    def __init__(self, what: object) -> None:
        self.what = what

    def choose(self, request: Any, nodes: Any) -> Any:
        return None


class Last(Policy):
    """Chooses the last node by id: correct, and recognizable in tests."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return max(nodes.by_id(""), key=lambda node: node.id, default=None)
