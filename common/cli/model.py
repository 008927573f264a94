"""`pdserve model`: makes the embedded model an ordinary checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from common.core.errors import ConfigError
from common.model.embedded import ensure_embedded_model


def main(argv: Sequence[str]) -> int:
    """Prints the folder; PDSERVE_CACHE says where it lies."""
    if argv:
        raise ConfigError("takes no options; PDSERVE_CACHE says where the model is kept")
    print(unpack(Console(stderr=True)))
    return 0


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
