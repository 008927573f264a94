"""`pdserve model`: makes the embedded model, or one of the Hub, an ordinary checkpoint folder, or
checks one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from pdserve.common.config.node import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.demo_model.embedded import (
    embedded_folder,
    ensure_embedded_model,
    resolve_model,
)


def main(argv: Sequence[str]) -> int:
    """Prints the folder; PDSERVE_CACHE says where it lies. A model's name is downloaded to the
    Hub's cache. With a FOLDER, checks that it can be served by this user; if it is where the
    embedded model belongs, that is unpacked first."""
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        raise ConfigError(
            "takes a FOLDER, a NAME (org/name) or nothing; PDSERVE_CACHE says where the embedded "
            "model is kept"
        )
    folder = embedded_folder()
    if argv:
        folder = Path(resolve_model(ModelConfig(model=argv[0])).model or "")
    if folder == embedded_folder():
        unpack(Console(stderr=True))
    check(folder)
    print(folder)
    return 0


def check(folder: Path) -> None:
    """Raises ConfigError when `folder` is no checkpoint, or this user may not read it."""
    if not folder.is_dir():
        beside = sorted(each.name for each in folder.parent.glob("[!.]*") if each.is_dir())
        near = f"; {folder.parent} has: {', '.join(beside)}" if beside else ""
        raise ConfigError(f"there is no folder {folder}{near}")
    unreadable = [path for path in (folder, *folder.iterdir()) if not os.access(path, os.R_OK)]
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
