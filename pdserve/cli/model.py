"""`pdserve model`: makes the embedded model, or one of the Hub, an ordinary checkpoint folder, or
checks one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from pdserve.client.terminal import console_of
from pdserve.common.config.node import ModelConfig
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.demo_model.embedded import (
    embedded_folder,
    ensure_embedded_model,
    resolve_model,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the folder. If it is where the embedded model belongs, that is unpacked first."""
    parser = CommandParser(
        prog="pdserve model",
        description="Prints the folder of a model that this user can serve. The embedded one is "
        "unpacked first, below PDSERVE_CACHE (default: ~/.cache/pdserve).",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, which is checked, or a name (org/name), which is downloaded to the Hub's "
        "cache (default: the embedded model)",
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


def check(folder: Path) -> None:
    """Raises ConfigError when `folder` is no checkpoint, or this user may not read it."""
    files = (folder, *folder.iterdir()) if folder.is_dir() else ()
    unreadable = [path for path in files if not os.access(path, os.R_OK)]
    if unreadable:
        raise ConfigError(
            f"user {os.getuid()}, as whom this runs, may not read {unreadable[0]}: "
            f"chmod -R a+rX {folder}"
        )
    ModelSpec.from_folder(folder)


def unpack(console: Console) -> Path:
    """The checkpoint folder, with a progress bar while it is made.

    Raises:
        ConfigError: the embedded model is not installed.
    """
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as bar:
        task = bar.add_task("unpacking the embedded model", total=None)
        return ensure_embedded_model(
            on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
