"""Runs other routers from PyPI in front of simulated OpenAI servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

import psutil

from benchmarks.fleet import free_port
from benchmarks.live import wait_for

ROOT = Path(__file__).parents[2]
COMMANDS = {"smg": ["launch", "--disable-tokenizer-autoload"], "vllm-router": []}
COLUMNS = {
    "ms_per_request": "CPU, ms per request",
    "requests_per_s": "requests/s here",
    "first_token_ms": "first token p50, ms",
}


def version(python: Path, name: str) -> str | None:
    """Returns the router's version in this Python's environment, None if it is not installed."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return asked.stdout.strip() or None


@contextmanager
def servers(model: str, count: int = 8) -> Iterator[list[int]]:
    """Runs `count` simulated servers; yields their ports."""
    command = [sys.executable, str(ROOT / "benchmarks/simulated_servers.py")]
    command += ["--model", model, "--count", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield [int(port) for port in started.stdout.readline().split()]
        finally:
            started.terminate()


@contextmanager
def router(
    python: Path, name: str, model: str, workers: list[int]
) -> Iterator[tuple[int, list[psutil.Process]]]:
    """Runs a router; yields its HTTP port and its processes."""
    port = free_port()
    command = [str(python.with_name(name)), *COMMANDS[name], "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--log-level", "error", "--worker-urls"]
    command += [f"http://127.0.0.1:{each}" for each in workers]
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        wait_for(lambda: _answers(port, model))
        process = psutil.Process(started.pid)
        yield port, [process, *process.children(recursive=True)]
    finally:
        started.terminate()
        started.wait(60)


def _answers(port: int, model: str) -> bool:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1, "stream": True}).encode()
    asked = Request(f"http://127.0.0.1:{port}/v1/completions", body)
    asked.add_header("Content-Type", "application/json")
    try:
        with urlopen(asked, timeout=5) as answer:
            return b"[DONE]" in answer.read()
    except OSError:
        return False


def plot(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Writes a PNG with three charts, each with a bar per router."""
    # Slow to import and absent without the `bench` extra.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.4 * len(found) + 1), layout="constrained")
    names = list(found)[::-1]
    for axes, (key, title) in zip(figure.subplots(1, len(COLUMNS)), COLUMNS.items(), strict=True):
        axes.barh(names, [median(each[key] for each in found[name]) for name in names])
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7, labelleft=key == next(iter(COLUMNS)))
    figure.savefig(path, format="png", dpi=120)
