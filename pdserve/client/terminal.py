"""The console and the argparse types that command-line tools share."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console

UNBROKEN = 1000  # columns


def console_of(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Returns a console that prints text literally, without rich's markup. If it is no terminal,
    it does not wrap lines."""
    console = Console(stderr=stderr, file=file, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNBROKEN
    return console


def number(
    kind: type[int] | type[float], least: float = -math.inf, most: float = math.inf
) -> Callable[[str], Any]:
    """Returns an argparse `type`: a number from `least` to `most`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from error
        if not least <= value <= most:
            bounds = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return convert


def positive(text: str) -> float:
    """Parses a number greater than 0; an argparse `type`."""
    value: float = number(float)(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object; an argparse `type`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value
