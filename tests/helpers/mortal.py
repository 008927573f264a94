"""Nodes that die or freeze at an exact point of the protocol. Runs inside the node's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from pdserve.common.core.plugins import import_string


def arm(number: str, point: str, count: str) -> None:
    """The process gets signal `number` when `point` (`module:Class.method`) is called the
    `count`-th time, or with `point>`, when that call has returned."""
    after = point.endswith(">")
    owner_path, _, name = point.rstrip(">").rpartition(".")
    owner = import_string(owner_path)
    left = int(count)

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), getattr(signal, number))

    setattr(owner, name, _struck(getattr(owner, name), strike, after))


def _struck(method: Callable[..., Any], strike: Callable[[], None], after: bool) -> Any:
    if after and iscoroutinefunction(method):

        @wraps(method)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = await method(*args, **kwargs)
            strike()
            return result

        return wrapped

    @wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not after:
            strike()
        result = method(*args, **kwargs)
        if after:
            strike()
        return result

    return plain
