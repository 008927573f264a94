"""The main function of a node's process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.sources import parse, resolve_model
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.host import host_errors_as_config_errors, loading, raise_open_file_limit
from pdserve.common.core.plugins import import_string
from pdserve.common.core.waits import saying
from pdserve.common.obs.logging import log_notes, setup_logging
from pdserve.common.obs.process import exit_within, log_error
from pdserve.common.text.tokenizer_file import try_tokenizer

OPEN_FILES = 512  # ranks and libraries take some 60, each router and peer a few more
SPINS = "1000"  # rounds, about 20 µs, that a torch thread spins before it sleeps


def run_node(
    role: str,
    node: str,
    description: str,
    argv: Sequence[str] | None = None,
    options: type[BothNodeConfig] = WorkerNodeConfig,
) -> int:
    """Runs a node until a signal; returns the exit code: 0 drained, 1 failed, 2 it cannot start as
    configured. `node` is the import string of an `EngineNode` whose config is of type `options`."""
    notes: list[str] = []
    config = parse(
        options, prog=f"pdserve {role}", description=description, argv=argv, say=notes.append
    )
    setup_logging(role, config.log)
    log_notes(notes)
    _spin_briefly()
    try:
        with host_errors_as_config_errors():
            raise_open_file_limit(OPEN_FILES)
            model = resolve_model(config.engine.model)
            try_tokenizer(model.tokenizer or model.model or "", model.tokenizer_mode)
            config = replace(config, engine=replace(config.engine, model=model))
            with saying("importing torch and its libraries"), loading():
                made = import_string(node)
            return asyncio.run(_serve(made, config))
    except PdserveError as error:
        log_error(error)
        return 2 if isinstance(error, ConfigError) else 1


def _spin_briefly() -> None:
    """Lets torch's threads spin for some microseconds before they sleep. By default they spin for
    milliseconds, at the expense of other nodes of this host. Without spinning, waking them some
    hundred times a step would take as long as a small step itself. OpenMP reads this when torch is
    loaded, so the node's class is imported later, by its import string."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


async def _serve(node: Any, config: BothNodeConfig) -> int:
    with saying("reading the model's files"):
        made = node(config)
    code: int = await made.serve(stopping=exit_within)
    return code
