"""`python -m pdserve.router`: starts a router on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pdserve.common.config.router import OPEN_FILES, RouterConfig
from pdserve.common.config.sources import parse, resolve_model
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.host import (
    host_errors_as_config_errors,
    leave,
    loading,
    raise_open_file_limit,
)
from pdserve.common.core.waits import saying
from pdserve.common.obs.logging import log_notes, setup_logging
from pdserve.common.obs.process import exit_within, log_error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router until a signal and returns the exit code; 2 means a wrong configuration."""
    notes: list[str] = []
    config = parse(
        RouterConfig,
        prog="pdserve router",
        description="The router: HTTP and gRPC front, placement, dispatch. Needs no torch.",
        argv=argv,
        say=notes.append,
    )
    setup_logging("router", config.log)
    log_notes(notes)
    routing = config.routing
    requests = routing.max_concurrent_requests + routing.max_queued_requests
    try:
        with host_errors_as_config_errors():
            raise_open_file_limit(
                OPEN_FILES + requests, "--max-concurrent-requests, --max-queued-requests"
            )
            config = replace(config, model=resolve_model(config.model, weights=False))
            with saying("importing libraries"), loading():
                if config.server.router_workers > 1:
                    from pdserve.router.supervisor import supervise as serve
                else:
                    from pdserve.router.server import serve
            return asyncio.run(serve(config, stopping=exit_within))
    except PdserveError as error:
        log_error(error)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    leave(main())
