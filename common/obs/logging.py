"""Logs one readable line or JSON object per event on stderr, with its request id.

Control characters in messages are escaped, because node ids, peers' errors and names of models and
fields are untrusted. The lines of a traceback are indented.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from io import TextIOBase
from typing import Any, ClassVar

from pdserve.common.config.shared import LogConfig
from pdserve.common.core.printable import cut, printable
from pdserve.common.obs.json_lines import JSONStream, json_line
from pdserve.common.obs.process import dump_stacks_on_signal

logger = logging.getLogger(__name__)

_STDERR = 2
MAX_MESSAGE_LENGTH = 8192  # characters of a message, or of a line of a traceback
MAX_LINES = 4096  # queued lines; further ones are dropped and counted
MAX_CHARS = 16 * 1024  # per line
FLUSH_TIMEOUT = 2.0  # seconds to write the last lines at the end of the process

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request of the current task, which its log lines contain."""


def setup_logging(
    role: str, config: LogConfig, rank: int | None = None, stream: TextIOBase | None = None
) -> None:
    """Sends this process's log records to `stream` (default: stderr, by a thread), replacing
    earlier handlers, and dumps stacks to stderr on SIGUSR1."""
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
    if config.log_format == "json" and isinstance(handler, LogWriter):
        _log_everything(name, handler)
    # gRPC's own lines have another format, and tell of each peer that stops.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # The role itself logs each request once, with its id and outcome.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _log_everything(name: str, writer: LogWriter) -> None:
    """Has warnings, uncaught exceptions and what is printed to stderr become objects of the log;
    only crashes within native code still write text."""
    logging.captureWarnings(True)
    sys.stderr = JSONStream(name, writer.put, lambda: _STDERR)

    def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            logger.info("interrupted")
        else:
            logger.critical("uncaught exception: %s", error, exc_info=(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread


def log_notes(notes: Iterable[str]) -> None:
    """Logs what `parse` has to say about the options."""
    for note in notes:
        logger.warning("%s", note)


def write_log(text: str) -> None:
    """Adds lines that another process has formatted to this process's log."""
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
    """Keys: time (UTC), level, process, role, logger, message; request_id, exception, and an
    error's code and blame if present. `process` is the role here; `pdserve up` has its own
    names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.name,
            "role": self.name,
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_MESSAGE_LENGTH),
        }
        if (request_id := request_id_var.get()) is not None:
            event["request_id"] = request_id
        event |= getattr(record, "error", {})
        if trace := _trace(self, record):
            event["exception"] = "\n".join(trace)
        return json_line(event)


def _request_id() -> str:
    return request_id_var.get() or "-"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if record.exc_info and record.exc_info[0] is not None:
        lines = formatter.formatException(record.exc_info).splitlines()
        return [printable(line, MAX_MESSAGE_LENGTH) for line in lines]
    return []


class LogWriter(logging.Handler):
    """Formats records on the calling thread, which knows the request, and writes them on its own
    thread: a stuck pipe reader, full disk or frozen terminal would otherwise block the event loop.
    Dropped lines are counted and reported once writing works again."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._dropped = 0
        self._closed = False
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # e.g. arguments that do not fit the format; standard handling
            self.handleError(record)
            return
        self.put(line + "\n")

    def put(self, text: str) -> None:
        """Queues text; never blocks."""
        if len(text) > MAX_CHARS:
            text = f"{text[:MAX_CHARS]}… ({len(text)} characters)\n"
        with self._changed:
            if len(self._lines) >= MAX_LINES:
                self._dropped += 1
                return
            self._lines.append(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when everything is written, or after FLUSH_TIMEOUT."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, FLUSH_TIMEOUT)

    def close(self) -> None:
        """Ends the thread after it has written the queued lines, if it can."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while (text := self._next()) is not None:
            _write(self._fd, text.encode(errors="backslashreplace"))
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Waits for queued text and returns all of it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return None
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped, self._writing = 0, True
        if dropped:
            told = f"{dropped} log lines were dropped here, because they were not read"
            record = logging.LogRecord(__name__, logging.WARNING, "", 0, told, None, None)
            lines.append(
                (self.format(record) if isinstance(self.formatter, JSONFormatter) else told) + "\n"
            )
        return "".join(lines)


def _write(fd: int, data: bytes) -> None:
    """Writes to the descriptor, bypassing sys.stderr, whose lock interpreter exit needs."""
    writable = select.poll()  # select() does not support descriptors above 1,023
    writable.register(fd, select.POLLOUT)
    with suppress(OSError):  # closed by the reader
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another process has made the file non-blocking
                writable.poll()
