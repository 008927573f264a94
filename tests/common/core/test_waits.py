"""A process that waits says for what, and never stays silent for long."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pdserve.common.core import waits
from pdserve.common.core.waits import progress, saying
from waiting import wait_until


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    monkeypatch.setattr(waits, "EVERY", 0.05)
    monkeypatch.setattr(waits, "SOON", 0.005)
    yield 0.05
    wait_until(lambda: "waits" not in {each.name for each in threading.enumerate()})


def test_a_long_wait_writes_a_line_again_and_again_and_a_short_one_none(every: float) -> None:
    lines: list[str] = []
    with saying("loading weights", write=lines.append):
        pass
    time.sleep(2 * every)
    assert not lines
    with saying("loading weights", write=lines.append):
        wait_until(lambda: len(lines) >= 3)
    assert all(re.fullmatch(r"loading weights, \d+ s so far", line) for line in lines)


def test_a_wait_that_is_likely_to_be_long_writes_its_first_line_soon(
    every: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "EVERY", 60.0)
    lines: list[str] = []
    with saying("compiling", soon=True, write=lines.append):
        wait_until(lambda: bool(lines))


def test_of_nested_waits_the_last_begun_is_named_and_the_silence_does_not_add_up(
    every: float,
) -> None:
    said: list[tuple[float, str]] = []

    def write(line: str) -> None:
        said.append((time.monotonic(), line))

    began = time.monotonic()
    with saying("outer", write=write):
        while time.monotonic() < began + 10 * every:
            with saying("inner", write=write):  # each shorter than the interval
                time.sleep(every / 3)
        wait_until(lambda: said[-1][1].startswith("outer"))
    names = [line.partition(",")[0] for _, line in said]
    assert "inner" in names
    assert len(said) >= 4, "short waits hide nothing"


def test_short_waits_that_follow_each_other_are_not_silent_together(every: float) -> None:
    lines: list[str] = []
    for _ in range(12):
        with saying("importing", write=lines.append):
            time.sleep(every / 3)
    assert len(lines) >= 2


def test_a_line_asks_for_the_state_of_its_moment(every: float) -> None:
    lines: list[str] = []
    done = 0
    with saying(lambda: f"loading: {done} %", write=lines.append):
        wait_until(lambda: bool(lines))
        done = 50
        wait_until(lambda: any(line.startswith("loading: 50 %") for line in lines))


def test_a_command_says_what_it_begins_and_repeats_what_takes_long(
    every: float, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ""
    with progress("pdserve x") as say:
        say("loading a\x1b")
        while told.count("\n") < 3:
            time.sleep(every / 5)
            told += capsys.readouterr().err
        say("the rest")
    lines = [*told.splitlines(), *capsys.readouterr().err.splitlines()]
    assert lines[0] == "pdserve x: loading a\\x1b" and lines[-1] == "pdserve x: the rest"
    assert all(
        re.fullmatch(r"pdserve x: loading a\\x1b, \d+ s so far", each) for each in lines[1:-1]
    )


@pytest.mark.parametrize(
    ("level", "shown"), [("info", "INFO"), ("warning", "WARNING"), ("error", None)]
)
def test_lines_are_shown_where_warnings_are(
    every: float, caplog: pytest.LogCaptureFixture, level: str, shown: str | None
) -> None:
    with caplog.at_level(level.upper()), saying("loading weights"):
        time.sleep(3 * every)
    assert {record.levelname for record in caplog.records} == ({shown} if shown else set())
    assert logging.getLogger().level != logging.ERROR


def test_a_program_without_logging_shows_the_lines() -> None:
    code = """
import time
from pdserve.common.core import waits
waits.EVERY = 0.05
with waits.saying("loading weights"):
    time.sleep(0.3)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loading weights, 0 s so far" in ran.stderr
