"""One readable line per event on stderr, or one JSON object, with the request it concerns.

Whatever a message holds, it stays on its line and moves no cursor: node ids, peers' error texts,
names of models and fields are others' words. A traceback's lines are indented.
"""

from __future__ import annotations

import json
import logging
import os
from contextvars import ContextVar
from datetime import UTC, datetime
from io import TextIOBase
from typing import Any, ClassVar

from pdserve.common.config.shared import LogConfig
from pdserve.common.core.printable import cut, json_printable, printable
from pdserve.common.obs.log_writer import LogWriter
from pdserve.common.obs.process import dump_stacks_on_signal

_STDERR = 2
MAX_MESSAGE_LENGTH = 8192  # characters of a message, or of a line of a traceback

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request the current task works for; every log line of that task carries it."""


def setup_logging(
    role: str, config: LogConfig, rank: int | None = None, stream: TextIOBase | None = None
) -> None:
    """Sends this process's log records to `stream` (default: stderr, by a thread of its own), in
    place of any earlier handlers, and on SIGUSR1 its stacks to stderr."""
    dump_stacks_on_signal()
    name = role if rank is None else f"{role}/{rank}"
    handler = LogWriter(_STDERR) if stream is None else logging.StreamHandler(stream)
    if config.log_format == "json":
        handler.setFormatter(JSONFormatter(name))
    else:
        colour = os.isatty(_STDERR) if stream is None else stream.isatty()
        handler.setFormatter(TextFormatter(name, colour=colour))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.flush()
        old.close()
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    # Requests are logged once, by the role, with their id and their outcome.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def write_log(text: str) -> None:
    """Puts lines that another process has formatted among this one's own."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.put(text)


class TextFormatter(logging.Formatter):
    """`HH:MM:SS.mmm LEVEL role[/rank] request-id message`; no request: `-`."""

    COLOURS: ClassVar[dict[int, str]] = {
        logging.DEBUG: "2",
        logging.WARNING: "33",
        logging.ERROR: "31",
        logging.CRITICAL: "1;31",
    }

    def __init__(self, name: str, *, colour: bool) -> None:
        super().__init__()
        self.name = name
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname:<7}"
        if self.colour and record.levelno in self.COLOURS:
            level = f"\x1b[{self.COLOURS[record.levelno]}m{level}\x1b[0m"
        message = printable(record.getMessage(), MAX_MESSAGE_LENGTH)
        line = f"{time} {level} {self.name} {printable(_request_id(), 128)} {message}"
        return "\n    ".join([line, *_trace(self, record)])


class JSONFormatter(logging.Formatter):
    """Keys: time (UTC), level, role, logger, message; request_id and exception if there are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self.name,
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_MESSAGE_LENGTH),
        }
        if (request_id := request_id_var.get()) is not None:
            event["request_id"] = request_id
        if trace := _trace(self, record):
            event["exception"] = "\n".join(trace)
        return json_printable(json.dumps(event, ensure_ascii=False))


def _request_id() -> str:
    return request_id_var.get() or "-"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if record.exc_info and record.exc_info[0] is not None:
        lines = formatter.formatException(record.exc_info).splitlines()
        return [printable(line, MAX_MESSAGE_LENGTH) for line in lines]
    return []
