"""A status that cannot be sent any more is no line of the log."""

from __future__ import annotations

import logging

import pytest

from pdserve.common.rpc.server import GrpcServer


async def test_a_status_that_comes_too_late_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC logs a traceback when the client's end and the status cross."""
    server = GrpcServer()
    server.bind("127.0.0.1", 0)
    await server.start()
    try:
        log = logging.getLogger("grpc._cython.cygrpc")
        log.error("ExecuteBatchError raised in core by servicer method [/%s]", "a")
        log.error("Unexpected [%s] raised by servicer method [/%s]", "ValueError", "a")
    finally:
        await server.stop(0)
    assert [each.getMessage()[:10] for each in caplog.records] == ["Unexpected"]
