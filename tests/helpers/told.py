"""A pytest plug-in (`-p told`) that writes the outcome of each test as soon as it is over, for
processes that wait for it; and a reader of that file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path("told.jsonl")  # in the folder where pytest runs

_why: defaultdict[str, str] = defaultdict(str)


def read(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the collected tests, and test → reason of the finished ones; the reason is "" for a
    test that passed. Tests are named `FILE.py::NAME[PARAMETERS]`."""
    told = folder / FILE
    text = told.read_text() if told.exists() else ""
    if "\n" not in text:
        return [], {}
    collected, *over = map(json.loads, text.split("\n")[:-1])  # the last line may be incomplete
    return collected, dict(over)


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell([_name(item.nodeid) for item in session.items])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _why[report.nodeid] += report.longreprtext or report.outcome


def pytest_runtest_logfinish(nodeid: str) -> None:
    _tell([_name(nodeid), _why.pop(nodeid, "")])


def _name(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{Path(file).name}::{test}"


def _tell(line: list[str]) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")
