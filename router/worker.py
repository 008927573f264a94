"""`python -m pdserve.router.worker`: one of several processes of a router, for `supervisor`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.host import (
    die_with_parent,
    host_errors_as_config_errors,
    leave,
    loading,
)
from pdserve.common.core.waits import saying
from pdserve.common.obs.logging import setup_logging
from pdserve.common.obs.process import exit_within, log_error
from pdserve.router.workers.siblings import SERVING, Siblings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """`argv`: the parent's socket, this worker's number, the registry ports of all, and flags.
    Returns the exit code, as the router's."""
    die_with_parent()
    end = socket.socket(fileno=int(argv[0]))  # at its end of file the parent is gone
    number, ports = int(argv[1]), [int(each) for each in argv[2].split(",")]
    config = parse(RouterConfig, prog="pdserve router", description="", argv=argv[3:])
    setup_logging("router", config.log, number)
    siblings = Siblings([port for index, port in enumerate(ports) if index != number])
    try:
        with host_errors_as_config_errors():
            return asyncio.run(_serve(config, siblings, end))
    except PdserveError as error:
        log_error(error)
        return 2 if isinstance(error, ConfigError) else 1


async def _serve(config: RouterConfig, siblings: Siblings, end: socket.socket) -> int:
    with saying("importing libraries"), loading():
        from pdserve.router.server import RouterServer
    router = RouterServer(config, siblings)
    await router.start()
    linked = await siblings.link.open(end)
    linked.add_done_callback(lambda _: signal.raise_signal(signal.SIGTERM))  # without its parent
    try:
        await siblings.link.call(SERVING)
        return await router.run_until_stopped()
    finally:
        exit_within()
        await router.stop()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
