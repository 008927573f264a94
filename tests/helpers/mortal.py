"""Nodes that die or freeze at an exact point of the protocol, whose steps can be held, or whose
clock is wrong: the code inside the node's process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType
from typing import Any

from pdserve.common.core.plugins import import_string

CLOCK_READERS = (
    "pdserve.common.rpc.auth",
    "pdserve.common.node.registration",
    "pdserve.router.cluster.registry",
)
STEP = "pdserve.common.worker.worker:ModelWorker.step"


def arm(number: str, point: str, count: str) -> None:
    """Sends signal `number` to this process when `point` (`module:Class.method`) is called the
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


def clock(path: str) -> None:
    """Makes pdserve's clock differ from the host's by the seconds in the file at `path`, read each
    time. gRPC compares deadlines with the host's clock outside of Python."""
    file = Path(path)
    wrong = ModuleType("time")
    vars(wrong).update(vars(time))
    wrong.time = lambda: time.time() + float(file.read_text())  # type: ignore[attr-defined]
    for name in CLOCK_READERS:
        reader = vars(import_module(name))
        assert reader["time"] is time  # or another module reads the clock now
        reader["time"] = wrong


def keepalive(seconds: str, *then: str) -> None:
    """Makes its server drop peers that have not answered for about `seconds`; then calls the
    function named by `then`, as in `WarmStart.start`."""
    server = import_module("pdserve.common.rpc.server")
    short = {key: int(float(seconds) * 500) for key, value in server.KEEPALIVE if value}
    server._OPTIONS[:] = [(key, short.get(key, value)) for key, value in server._OPTIONS]
    if then:
        import_string(then[0])(*then[1:])


def hold(path: str) -> None:
    """Holds the steps of a node of one rank while the file at `path` exists. Its second word is a
    number of steps to let through, counted anew when its first word changes. Everything else
    continues."""
    owner_path, _, name = STEP.rpartition(".")
    owner, file = import_string(owner_path), Path(path)
    seen, left = "", 0

    def wait() -> None:
        nonlocal seen, left
        while words := _words(file):
            if words[0] != seen:
                seen, left = words[0], int(words[1])
            if left:
                left -= 1
                return
            time.sleep(0.005)

    setattr(owner, name, _struck(getattr(owner, name), wait, after=False))


def _words(file: Path) -> list[str]:
    """The words of a file, none if it is not there."""
    with suppress(FileNotFoundError):
        return file.read_text().split()
    return []


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
