"""When a request goes on elsewhere, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import (
    Blame,
    Cancelled,
    InvalidRequest,
    NodeError,
    PdserveError,
    TransferError,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.recovery import WAITING, Recovery
from pdserve.router.registry import Node, Registry

LIMIT = 3
LOST = NodeError("gone", code="PEER_LOST", blame=Blame.DECODE)


@pytest.fixture
def node() -> Node:
    registry = Registry(RoutingConfig())
    registry.register(pb.NodeInfo(node_id="d", role=pb.ROLE_DECODE), pb.NodeLoad(healthy=True))
    return registry.usable(pb.ROLE_DECODE)[0]


def fails_after(recovery: Recovery, fail: Callable[[], None]) -> int:
    """How many failures it bears."""
    for count in range(1000):
        try:
            fail()
        except PdserveError:
            return count
    raise AssertionError("it never gives up")


def test_failures_in_a_row_end_it(node: Node) -> None:
    recovery = Recovery(LIMIT)
    assert fails_after(recovery, lambda: recovery.failed(LOST, node)) == LIMIT
    assert recovery.failures == LIMIT + 1
    assert recovery.avoid == {"d"}


@pytest.mark.parametrize("kind", [Cancelled, TransferError])
def test_a_node_cannot_know_that_the_client_left(node: Node, kind: type[PdserveError]) -> None:
    """It saw a call end; that the router is here shows that it was cut off."""
    recovery = Recovery(LIMIT)
    recovery.parted(kind("the call ended", code="CANCELLED"), node)
    assert recovery.failures == 1


def test_a_token_between_them_forgives_all(node: Node) -> None:
    recovery = Recovery(LIMIT)
    for _ in range(10 * LIMIT):
        recovery.failed(LOST, node)
        recovery.progress(node.role)
    assert recovery.failures == 10 * LIMIT


def test_a_request_that_only_waited_is_hardly_to_blame(node: Node) -> None:
    recovery = Recovery(LIMIT)
    borne = fails_after(recovery, lambda: recovery.failed(LOST, node, computing=False))
    assert borne == LIMIT / WAITING


ODD = NodeError("not a number", code="SEQUENCE_FAILED", blame=Blame.DECODE)


def test_who_gets_further_elsewhere_is_no_poison(node: Node) -> None:
    recovery = Recovery(LIMIT)
    for _ in range(5):
        recovery.failed(ODD, node)
        recovery.progress("prefill")  # of which nothing follows for the decode node
        recovery.progress(node.role)
    recovery.failed(ODD, node)
    recovery.progress("prefill")
    with pytest.raises(NodeError, match="failed twice in the same way"):
        recovery.failed(ODD, node)


def test_a_node_that_fails_what_others_compute_is_at_fault(node: Node) -> None:
    """A broken accelerator, say, whose every row is NaN: it fails fast and looks idle."""
    for _ in range(RoutingConfig().breaker_failures):
        assert node.breaker.allows()
        recovery = Recovery(LIMIT)
        recovery.failed(ODD, node)
        recovery.progress(node.role)
    assert not node.breaker.allows()


def test_transfers_that_fail_end_in_a_local_prefill(node: Node) -> None:
    recovery = Recovery(LIMIT)
    recovery.parted(TransferError("torn"), node)
    assert not recovery.local_prefill
    recovery.parted(TransferError("torn"), node)
    assert recovery.local_prefill


@pytest.mark.parametrize(
    "error", [InvalidRequest("no"), PdserveError("a defect", blame=Blame.ROUTER)]
)
def test_what_another_node_would_not_cure(node: Node, error: PdserveError) -> None:
    recovery = Recovery(LIMIT)
    with pytest.raises(PdserveError):
        recovery.failed(error, node)
    assert recovery.failures == 0
