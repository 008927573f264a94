"""`pdserve model`: unpacks the embedded model, downloads one from the Hub, or checks a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pdserve.client.terminal import console_of
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.generic_spec import Outline, read_outline
from pdserve.common.core.model_spec import ModelSpec
from pdserve.demo_model.embedded import (
    embedded_folder,
    ensure_embedded_model,
    resolve_model,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the checkpoint folder, after unpacking or downloading the model if necessary."""
    parser = CommandParser(
        prog="pdserve model",
        description="Print the checkpoint folder of a model. The embedded model is unpacked to "
        "PDSERVE_CACHE first (default: ~/.cache/pdserve).",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder to check, or a name (org/name) to download to the Hub's cache (default: the "
        "embedded model)",
    )
    named = parser.parse_args(argv).model
    folder = embedded_folder()
    if named is not None:
        folder = Path(resolve_model(ModelConfig(model=named)).model or "")
    if folder == embedded_folder():
        unpack(console_of(stderr=True))
    check(folder)
    print(folder)
    return 0


def check(
    folder: Path, impl: str = "auto", overrides: Mapping[str, Any] | None = None
) -> Outline | ModelSpec:
    """Reads the config of a checkpoint. Raises ConfigError when `folder` is none or this user may
    not read it."""
    files = (folder, *folder.iterdir()) if folder.is_dir() else ()
    unreadable = [path for path in files if not os.access(path, os.R_OK)]
    if unreadable:
        raise ConfigError(
            f"this process (user {os.getuid()}) may not read {unreadable[0]}: "
            f"chmod -R a+rX {folder}"
        )
    return read_outline(folder, impl, overrides or {})


def unpack(console: Console) -> Path:
    """Unpacks the embedded model with a progress bar and returns its checkpoint folder.

    Raises:
        ConfigError: the embedded model is not installed.
    """
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as bar:
        task = bar.add_task("unpacking the embedded model", total=None)
        return ensure_embedded_model(
            on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
