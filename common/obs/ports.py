"""The ports a process really listens on, told through a file: port 0 without a race."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_ports(path: str | Path, ports: Mapping[str, int]) -> None:
    """Writes `{"http": 8000, …}`; a reader sees the whole file or none."""
    target = Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        draft.write_text(json.dumps(dict(ports)))
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(target)) from error


def read_ports(path: str | Path) -> dict[str, int] | None:
    """The ports, or None while the process has not written them."""
    try:
        return dict(json.loads(Path(path).read_text()))
    except FileNotFoundError:
        return None
