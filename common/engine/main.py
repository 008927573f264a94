"""The main function of a node's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from common.config.schema import WorkerNodeConfig
from common.config.sources import parse
from common.core.errors import ConfigError, PdserveError
from common.engine.node import EngineNode
from common.obs.logging import setup_logging

logger = logging.getLogger(__name__)


def run_node(
    node: type[EngineNode[Any, Any]], description: str, argv: Sequence[str] | None = None
) -> int:
    """Runs a node until a signal; returns the exit code: 0 drained, 1 failed, 2 it cannot start
    as configured."""
    role = str(node.blame)
    config = parse(WorkerNodeConfig, prog=f"pdserve {role}", description=description, argv=argv)
    setup_logging(role, config.log)
    try:
        return asyncio.run(_serve(node, config))
    except PdserveError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1


async def _serve(node: type[EngineNode[Any, Any]], config: WorkerNodeConfig) -> int:
    return await node(config).serve()
