"""The input and output files of a batch, in OpenAI's format.

An answer counts once it is on the disk. If a run ends in the middle of a line, the next run removes
that line and asks again.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from pdserve.client.server import Answer, encode
from pdserve.common.core.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.common.core.printable import cut
from pdserve.common.core.request import new_request_id

_URL = re.compile(r"/v1/[a-z0-9_/-]{1,200}")
MAX_SHOWN = 100  # characters of a bad value
MAX_MESSAGE = 500  # characters of a failure's message
MAX_CODES = 1000  # of errors that are counted apart


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the input: a request, or the error of an invalid line."""

    line: int  # from 1
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: InvalidRequest | None = None


def read_items(path: Path) -> Iterator[Item]:
    """Yields one item per line that is not empty, valid or not, in order.

    Raises:
        ConfigError: `path` is a pipe or a device.
    """
    seen: set[str] = set()
    _check_regular(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _item(number, line, seen)


def _check_regular(path: Path) -> None:
    """Raises ConfigError for a pipe or device: batch files are read more than once."""
    if stat.S_ISFIFO(mode := path.stat().st_mode) or stat.S_ISCHR(mode):
        raise ConfigError(f"{path} is a pipe or a device, and is read more than once: give a file")


def _item(number: int, line: bytes, seen: set[str]) -> Item:
    custom_id: str | None = None
    try:
        request = _request(line)
        custom_id = request["custom_id"]
        if custom_id in seen:
            raise InvalidRequest("an earlier line has the same custom_id", param="custom_id")
        seen.add(request["custom_id"])
        body = _body(request)
        return Item(number, custom_id, request["url"], body)
    except InvalidRequest as error:
        duplicate = error.param == "custom_id"
        return Item(number, None if duplicate else custom_id, error=error)


def _request(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}", code="INVALID_JSON") from error
    if not isinstance(request, dict):
        raise InvalidRequest("the line is not a JSON object")
    if not isinstance(request.get("custom_id"), str) or not request["custom_id"]:
        raise InvalidRequest("custom_id must be text", param="custom_id")
    return request


def _body(request: Mapping[str, Any]) -> bytes:
    method, url, body = (request.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise InvalidRequest(f"method must be POST, not {_shown(method)}", param="method")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise InvalidRequest(f"url must be a path such as /v1/completions, not {_shown(url)}")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("stream: a batch does not stream", param="stream")
    return encode(body)


def _shown(value: object) -> str:
    return cut(repr(value), MAX_SHOWN)


@dataclass(slots=True)
class Failures:
    """Requests that failed with the same status, code and parameter, and the first's message."""

    code: str  # "404 model_not_found (model)"
    message: str
    count: int = 0


@dataclass(slots=True)
class Done:
    """The items that the output file has: requests by custom_id, invalid lines by number."""

    ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    failed: int = 0
    failures: dict[str, Failures] = field(default_factory=dict)  # by code

    def has(self, item: Item) -> bool:
        return item.line in self.lines if item.custom_id is None else item.custom_id in self.ids

    def add(self, line: Mapping[str, Any]) -> None:
        if line["custom_id"] is None:
            self.lines.add(line["error"]["line"])
        else:
            self.ids.add(line["custom_id"])
        if not succeeded(line):
            self._add_failure(_failure(line))

    def commonest(self) -> Failures | None:
        """Returns the failures with the most frequent code, None without any."""
        return max(self.failures.values(), key=lambda each: each.count, default=None)

    def _add_failure(self, failure: Failures) -> None:
        self.failed += 1
        if failure.code not in self.failures and len(self.failures) >= MAX_CODES:
            return
        self.failures.setdefault(failure.code, failure).count += 1


def succeeded(line: Mapping[str, Any]) -> bool:
    return line["error"] is None and line["response"]["status_code"] == 200


def _failure(line: Mapping[str, Any]) -> Failures:
    """Returns the code and message of a line that failed; its server may send any body."""
    error, status = line["error"], ""
    if error is None:
        answer = line["response"]
        status, body = f"{answer['status_code']} ", answer["body"]
        error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        error = {"message": error}
    code = error.get("code") or error.get("type") or ""
    param = f" ({error['param']})" if error.get("param") else ""
    shown = cut(f"{status}{code}{param}".strip(), MAX_SHOWN)
    return Failures(shown, cut(str(error.get("message")), MAX_MESSAGE))


class Output:
    """The output file, with the answers of this and earlier runs. Locked by one run at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file has other content, is a device, or another run writes
        it."""
        self.path = path
        self.done = Done()
        self._pending: list[Mapping[str, Any]] = []
        self._turn = asyncio.Lock()
        self._writing = Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _check_regular(path)
            self._lock()
            self._end = self._read()  # bytes of whole lines
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise

    async def record(self, line: Mapping[str, Any]) -> None:
        """Appends `line` and returns once it is on the disk. Concurrent calls share one fsync.

        Raises:
            OSError: the file cannot be written.
        """
        self._pending.append(line)
        async with self._turn:
            if self._pending:
                await asyncio.to_thread(self._flush)

    def close(self) -> None:
        """Writes the pending lines and closes the file. Raises OSError like `record`."""
        try:
            self._flush()
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        with self._writing:
            lines, self._pending = self._pending, []
            data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            try:
                self._write(data)
            except OSError:
                os.ftruncate(self._file, self._end)  # or the next line would follow half a line
                raise
            self._end += len(data)
            for line in lines:
                self.done.add(line)

    def _write(self, data: bytes) -> None:
        if data:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run writes {self.path}") from error

    def _read(self) -> int:
        """Reads the earlier answers; returns how many bytes of the file are whole lines."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line))
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise ConfigError(
                        f"{self.path}, line {number}, is not a batch answer: name another file"
                    ) from error
                end += len(line)
        return end


def answered(item: Item, answer: Answer) -> dict[str, Any]:
    """Returns the output line of a request that the server answered, with any status."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body,
    }
    return {**_head(item), "response": response, "error": None}


def failed(item: Item, error: PdserveError) -> dict[str, Any]:
    """Returns the output line of a request without an answer."""
    shown = {
        "code": error.code.lower(),
        "message": error.message,
        "param": error.param,
        "line": item.line,
    }
    return {**_head(item), "response": None, "error": shown}


def _head(item: Item) -> dict[str, Any]:
    return {"id": new_request_id("batch_req"), "custom_id": item.custom_id}
