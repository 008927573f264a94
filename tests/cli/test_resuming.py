"""How long a resuming client tries; `tests/e2e/test_routers.py` has its streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pdserve.client import resuming, resuming_grpc
from pdserve.common.rpc.pb import inference_pb2 as pb


class Gone(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.fixture(params=["http", "grpc"])
def kind(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Calls by which a stream's try fails, and a new event of it comes."""
    if request.param == "grpc":
        made = resuming_grpc.Progress(pb.GenerateRequest(), 30.0)
        event = pb.GenerateResponse(event_id=b"a")
        return lambda: made.failed(Gone(), 1), lambda: made.take(event)
    progress = resuming.Progress({}, 30.0)
    lines = (b"id: a\n", b'data: {"choices": []}\n', b"\n")
    return (
        lambda: progress.failed(ConnectionError("gone")),
        lambda: [progress.take(line) for line in lines],
    )


def test_patience_is_with_tries_and_not_with_who_reads_slowly(
    kind: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, take = kind
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(resuming, "time", clock)
    monkeypatch.setattr(resuming_grpc, "time", clock)
    take()
    now += 3600  # before it reads on
    assert fail() > 0
    now += 29
    assert fail() > 0
    take()
    assert fail() > 0
    now += 31
    with pytest.raises((ConnectionError, grpc.RpcError)):
        fail()
