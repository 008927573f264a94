"""`LLM` with fake roles: what is left of it, however it ends, and what it says of a bad start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import pdserve
from paths import HELPERS, MODELS
from pdserve import LLM, SamplingParams
from pdserve.cli import cluster
from pdserve.common.core.errors import ConfigError, NodeError, PdserveError
from processes import command

FAKE_ROLE = str(HELPERS / "fake_role.py")
FAKES = {
    role: (sys.executable, FAKE_ROLE, role) for role in ("router", "prefill", "decode", "both")
}
MODEL = str(MODELS / "llama-gqa")
SCRIPT = f"""
import signal
from pdserve import LLM
from pdserve.cli import cluster
cluster.PROGRAMS.update({FAKES!r})
llm = LLM(model={MODEL!r})
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def fake_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    for role, program in FAKES.items():
        monkeypatch.setitem(cluster.PROGRAMS, role, program)


def fakes(process: psutil.Process | None = None) -> list[psutil.Process]:
    children = (process or psutil.Process()).children()
    return [each for each in children if FAKE_ROLE in command(each)]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_ends_leaves_no_process(number: int) -> None:
    """By Ctrl-C in the middle, and by a kill, after which it can do nothing any more."""
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE)
    assert script.stdout is not None
    assert script.stdout.readline() == b"ready\n"
    roles = fakes(psutil.Process(script.pid))
    assert len(roles) == 3
    script.send_signal(number)
    assert script.wait(60) == -number
    wait_until(lambda: not any(map(psutil.Process.is_running, roles)))


def test_interrupted_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DECODE", "leave")  # so that it is never ready

    def interrupt() -> None:
        wait_until(lambda: len(fakes()) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        LLM(model=MODEL)
    thread.join()
    assert fakes() == []


def test_interrupted_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that does not listen is killed at once."""
    monkeypatch.setenv("FAKE_PREFILL", "deaf")
    llm = LLM(model=MODEL, drain_timeout=1000.0)
    decode = next(each for each in fakes() if "decode" in command(each))

    def interrupt() -> None:
        wait_until(lambda: decode not in fakes())  # which has left already
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    thread.join()
    assert fakes() == []
    llm.close()
    with pytest.raises(PdserveError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize(
    ("mode", "kind", "reason"),
    [("misconfigured", ConfigError, "decode-0 cannot start"), ("crash", NodeError, "exit code 3")],
)
def test_a_start_that_fails_says_why(
    mode: str, kind: type[PdserveError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last words of the process that did not start."""
    monkeypatch.setenv("FAKE_DECODE", mode)
    with pytest.raises(kind, match=rf"{reason}.*: decode options"):
        LLM(model=MODEL, restart="no")
    assert fakes() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode_tb": 2}, "did you mean decode_tp"),
        ({"decode": "2"}, "decode: '2' is not a whole number"),
        ({"decode": True}, "decode: True is not a whole number"),
        ({"decode": -1}, "decode: -1 is less than 0"),
        ({"restart": "maybe"}, "restart: 'maybe' is none of on-failure, no"),
        ({"max_client_share": float("nan")}, "not a finite number"),
        ({"prefill": 0}, "need each other"),
        ({"enable_chunked_prefill": False}, "chunked prefill is always on"),
        ({"model": None, "max_model_len": None, "prefill": 0}, "need each other"),
    ],
)
def test_options_are_checked_as_flags_are(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        LLM(**options)
    assert not str(error.value).startswith("["), "a user reads it, without code and blame"
    assert fakes() == []


def test_parameters_have_the_names_of_the_api() -> None:
    params = SamplingParams(max_tokens=5, stop=["a"], logprobs=0)
    assert params == SamplingParams(stop=["a"], logprobs=0, max_tokens=5)
    assert repr(params) == "SamplingParams(max_tokens=5, stop=['a'], logprobs=0)"
    assert params.body() == {
        "max_tokens": 5, "stop": ["a"], "logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)


def test_the_package_has_its_names_and_no_others() -> None:
    assert all(hasattr(pdserve, name) for name in pdserve.__all__)
    with pytest.raises(AttributeError):
        pdserve.LLMM  # noqa: B018
    code = (
        "import sys, pdserve; sys.exit(len([n for n in sys.modules if n.startswith('pdserve.')]))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0
