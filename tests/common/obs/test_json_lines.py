"""JSON logs: every line on stderr is one object that names its process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.obs.json_lines import JSONStream, in_log

EVERYTHING = """
import logging, sys, threading, warnings
from pdserve.common.config.shared import LogConfig
from pdserve.common.obs.logging import setup_logging

setup_logging("prefill", LogConfig(log_format="json"), rank=1)
logging.getLogger("x").info("plain")
warnings.warn("a library's warning")
print("printed\\nin two lines", file=sys.stderr)
sys.stderr.write("10%\\r20%\\r")
logging.getLogger("x").info("\\x00" * 9000)
try:
    raise KeyError("\\x1b" * 9000)
except KeyError:
    logging.getLogger("x").exception("\\x07" * 9000)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end\\nof it")
"""


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(isinstance(each, dict) and each["process"] and each["message"] for each in found)
    return found


def test_json_logs_stay_json_whatever_is_written() -> None:
    run = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True)
    assert run.returncode == 1
    found = objects(run.stderr)
    assert {each["process"] for each in found} == {"prefill/1"}
    said = [each["message"] for each in found]
    assert said[0] == "plain" and "a library's warning" in said[1]
    assert said[2:6] == ["printed", "in two lines", "10%", "20%"]
    assert ["ZeroDivisionError" in each.get("exception", "") for each in found[-2:]] == [
        True,
        False,
    ]
    assert said[-1] == "uncaught exception: the end\nof it"
    assert "RuntimeError: the end" in found[-1]["exception"]


@pytest.mark.parametrize("flags", [["--log-format=json"], ["--log-format", "json"], []])
def test_errors_before_the_log_is_set_up_are_json(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flags:
        monkeypatch.setenv("PDSERVE_LOG_FORMAT", "json")
    command = [str(Path(sys.executable).with_name("pdserve")), "router", *flags, "--port=x"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    (found,) = objects(run.stderr)
    assert found["process"] == "router" and "--port" in found["message"]


def test_lines_of_a_child_name_it() -> None:
    own = json.loads(in_log("prefill-0", '{"process": "prefill", "message": "m", "x": 1}'))
    assert own == {"process": "prefill-0", "message": "m", "x": 1}
    for text in ("Traceback (most recent call last):", '{"cut o', "{}x", "[" * 99_999, "\x1b[2J"):
        found = json.loads(line := in_log("prefill-0", text))
        assert found["process"] == "prefill-0" and found["message"][:9] == text[:9]
        assert len(line) < 16 * 1024 and line.isprintable()


def test_lines_without_an_end_are_bounded() -> None:
    lines: list[str] = []
    stream = JSONStream("up", lines.append, lambda: 2)
    for _ in range(1000):
        stream.write("." * 100)
    assert 10 <= len(lines) <= 20 and not stream.isatty()
    assert {json.loads(line)["process"] for line in lines} == {"up"}
    stream.write("\n" + in_log("prefill-0", "x") + "\n")
    assert json.loads(lines[-1])["process"] == "prefill-0", "up passes on what its children write"
