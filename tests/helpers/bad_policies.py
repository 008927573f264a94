"""Policies that tests name as module:Class, each with a fault; and one that is right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdserve.router.cluster.policy import Policy


class Raises(Policy):
    def choose(self, request: Any, nodes: Any) -> Any:
        raise RuntimeError("this policy always raises")

    def placed(self, request: Any, node: Any) -> None:
        raise RuntimeError("and then again")


class Absent(Policy):
    """Chooses a node that is none."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return SimpleNamespace(id="absent")


class Dead(Policy):
    """Remembers a node."""

    def __init__(self) -> None:
        self.first: Any = None

    def choose(self, request: Any, nodes: Any) -> Any:
        self.first = self.first or next(nodes.by_id(""), None)
        return self.first


class Wordy(Policy):
    """Names a node instead of returning it."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return next(nodes.by_id("")).id


class NeedsMore(Policy):
    def __init__(self, what: object) -> None:
        self.what = what

    def choose(self, request: Any, nodes: Any) -> Any:
        return None


class Last(Policy):
    """Takes the last one by id: it is right, and any test sees that it is at work."""

    def choose(self, request: Any, nodes: Any) -> Any:
        return max(nodes.by_id(""), key=lambda node: node.id, default=None)
