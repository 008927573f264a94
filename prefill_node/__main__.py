"""`python -m prefill_node`: the prefill role alone, on any host."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from common.config.schema import WorkerNodeConfig
from common.config.sources import parse
from common.core.errors import ConfigError, PdserveError
from common.obs.logging import setup_logging
from prefill_node.node import PrefillNode

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill node until a signal; returns the exit code: 2 when it cannot start as
    configured."""
    config = parse(
        WorkerNodeConfig,
        prog="pdserve prefill",
        description="A prefill node: computes prompts and hands their KV to decode nodes.",
        argv=argv,
    )
    setup_logging("prefill", config.log)
    try:
        return asyncio.run(_serve(config))
    except PdserveError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1


async def _serve(config: WorkerNodeConfig) -> int:
    return await PrefillNode(config).serve()


if __name__ == "__main__":
    sys.exit(main())
