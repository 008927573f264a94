"""Keeps a log of JSON objects whole: what is written beside the log becomes objects, too."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from pdserve.common.core.printable import cut, json_printable

MAX_CHARS = 15 * 1024  # of a line, so that no writer cuts it
_SHORT = 500  # characters of each text in a line that would be longer: a character may become six
_PENDING = 8192  # characters of a line without an end that are held back


def json_line(event: Mapping[str, Any]) -> str:
    """Returns the event as one line; its texts are cut if it would be too long."""
    line = json_printable(json.dumps(event, ensure_ascii=False, default=str))
    if len(line) <= MAX_CHARS:
        return line
    short = {name: cut(str(value), _SHORT) for name, value in list(event.items())[:20]}
    return json_printable(json.dumps(short, ensure_ascii=False))


def event(process: str, message: str, level: str = "info", **more: Any) -> dict[str, Any]:
    """Returns a log event of now."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "level": level, "process": process, "message": message, **more}


def in_log(process: str, line: str, named: bool = False) -> str:
    """Returns a line that a process has written as an object that names it: its own object with
    `process`, or one with the line as `message`. `named`: an object may name another process."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
            name = found.get("process", process) if named else process
            return json_line({**found, "process": name})
        except (ValueError, RecursionError):
            pass  # cut off, or another program's text
    return json_line(event(process, cut(line, MAX_CHARS), "warning", logger="stderr"))


def wants_json(argv: Sequence[str]) -> bool:
    """Returns whether the command line or the environment asks for a JSON log, before options are
    read."""
    return (
        "--log-format=json" in argv
        or ("--log-format", "json") in pairwise(argv)
        or os.environ.get("PDSERVE_LOG_FORMAT") == "json"
    )


class JSONStream(io.TextIOBase):
    """Stands for standard error: each line becomes an object, unless it is one."""

    def __init__(self, process: str, put: Callable[[str], Any], fileno: Callable[[], int]) -> None:
        """`put` takes whole lines with their ends. `fileno`: for what needs a descriptor."""
        self._process = process
        self._put = put
        self._fileno = fileno
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        if len(self._rest) > _PENDING:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            if line.strip():
                self._put(in_log(self._process, line, named=True) + "\n")
        return len(text)

    def fileno(self) -> int:
        return self._fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True
