"""Policies that tests name as module:Class: each has a fault, except one."""

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
