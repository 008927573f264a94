"""When a request goes on elsewhere, and when it gives up."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from time import monotonic

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
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.retry import ALONE, WAITING, Deadline, Retries

LIMIT = 3
LOST = NodeError("gone", code="PEER_LOST", blame=Blame.DECODE)


def a_node(role: pb.Role) -> Node:
    registry = Registry(RoutingConfig())
    registry.register(pb.NodeInfo(node_id="d", role=role), pb.NodeLoad(healthy=True))
    return registry.nodes()[0]


@pytest.fixture
def node() -> Node:
    return a_node(pb.ROLE_DECODE)


def fails_after(retries: Retries, fail: Callable[[], None]) -> int:
    """How many failures it bears."""
    for count in range(1000):
        try:
            fail()
        except PdserveError:
            return count
    raise AssertionError("it never gives up")


@pytest.mark.parametrize(("seconds", "patience"), [(60.0, 60.0), (0.0, math.inf)])
def test_an_answer_that_has_begun_waits_for_nodes_as_long_as_for_a_token(
    seconds: float, patience: float
) -> None:
    deadline = Deadline(queue_timeout=5.0, request_timeout=seconds)
    with deadline.waiting() as until:
        assert until <= monotonic() + 5
    for _ in range(2):
        deadline.token(now := monotonic())
        with deadline.waiting() as until:
            assert now + patience <= until <= monotonic() + patience


def test_failures_in_a_row_end_it(node: Node) -> None:
    retries = Retries(LIMIT)
    assert fails_after(retries, lambda: retries.node_failed(LOST, node)) == LIMIT
    assert retries.failures == LIMIT + 1
    assert retries.avoid == {"d"}


@pytest.mark.parametrize("kind", [Cancelled, TransferError])
def test_a_node_cannot_know_that_the_client_left(node: Node, kind: type[PdserveError]) -> None:
    """It saw a call end; that the router is here shows that it was cut off."""
    retries = Retries(LIMIT)
    retries.transfer_failed(kind("the call ended", code="CANCELLED"), node)
    assert retries.failures == 1


def test_a_token_between_them_forgives_all(node: Node) -> None:
    retries = Retries(LIMIT)
    for _ in range(10 * LIMIT):
        retries.node_failed(LOST, node)
        retries.progress(node.role)
    assert retries.failures == 10 * LIMIT


def test_a_request_that_only_waited_is_hardly_to_blame(node: Node) -> None:
    retries = Retries(LIMIT)
    borne = fails_after(retries, lambda: retries.node_failed(LOST, node, computing=False))
    assert borne == LIMIT / WAITING


def test_deaths_count_where_the_same_work_was_done() -> None:
    """A request that kills prefill nodes and nodes of both roles in turn kills no more of them."""
    retries, roles = Retries(LIMIT), cycle((a_node(pb.ROLE_PREFILL), a_node(pb.ROLE_BOTH)))
    assert fails_after(retries, lambda: retries.node_failed(LOST, next(roles))) == LIMIT
    retries = Retries(LIMIT)
    for _ in range(LIMIT):
        retries.node_failed(LOST, a_node(pb.ROLE_BOTH))
    assert all(retries.last_chance(role) for role in ("prefill", "decode", "both"))
    retries.progress("prefill")
    assert retries.last_chance("both"), "what it did there it may do in the next step"
    retries.progress("decode")
    assert not retries.last_chance("both")


def test_a_death_beside_another_suspect_ends_neither(node: Node) -> None:
    """Either may have killed the node; the next death is one's own."""
    retries = Retries(LIMIT)
    for _ in range(LIMIT):
        retries.node_failed(LOST, node, alone=False)
    assert retries.last_chance("decode"), "until then it does not matter who was there"
    for _ in range(5):
        retries.node_failed(LOST, node, alone=False)
    assert retries.last_chance("decode")
    with pytest.raises(NodeError, match="died in a row"):
        retries.node_failed(LOST, node)


def test_the_wait_for_a_node_to_itself_is_bounded_and_grows(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, retries = 100.0, Retries(1)
    monkeypatch.setattr("pdserve.router.requests.retry.monotonic", lambda: now)
    retries.node_failed(LOST, node)
    for number in range(4):
        wait = ALONE * 2**number
        assert not retries.may_share()
        now += wait - 0.1
        assert not retries.may_share()
        now += 0.2
        assert retries.may_share()
        retries.placed()
        assert not retries.may_share(), "its wait for a node of the other role begins"
        retries.placed()
        retries.node_failed(LOST, node, alone=False)


def test_suspects_know_whether_the_node_was_theirs(node: Node) -> None:
    registry = Registry(RoutingConfig())
    plain, first, second, third = (InFlightLoad(registry, node, 0, key) for key in ("", *"abc"))
    with plain, first:
        assert plain.alone and first.alone
        second.__enter__()
        assert plain.alone and not (first.alone or second.alone)
        second.progressed()  # it has not killed the node
        assert first.alone and {each.request_id for each in node.suspects} == {"a"}
        third.__enter__()
        third.__exit__(type(LOST), LOST, None)
        assert not first.alone, "the third, too, may have killed it"
    assert not node.suspects


ODD = NodeError("not a number", code="SEQUENCE_FAILED", blame=Blame.DECODE)


def test_a_request_that_gets_further_elsewhere_is_no_poison(node: Node) -> None:
    retries = Retries(LIMIT)
    for _ in range(5):
        retries.node_failed(ODD, node)
        retries.progress("prefill")  # of which nothing follows for the decode node
        retries.progress(node.role)
    retries.node_failed(ODD, node)
    retries.progress("prefill")
    with pytest.raises(NodeError, match="failed twice in the same way"):
        retries.node_failed(ODD, node)


def test_a_node_that_fails_what_others_compute_is_at_fault(node: Node) -> None:
    """A broken accelerator, say, whose every row is NaN: it fails fast and looks idle."""
    for _ in range(RoutingConfig().breaker_failures):
        assert node.breaker.allows()
        retries = Retries(LIMIT)
        retries.node_failed(ODD, node)
        retries.progress(node.role)
    assert not node.breaker.allows()


def test_transfers_that_fail_end_in_a_local_prefill(node: Node) -> None:
    retries = Retries(LIMIT)
    retries.transfer_failed(TransferError("torn"), node)
    assert not retries.local_prefill
    retries.transfer_failed(TransferError("torn"), node)
    assert retries.local_prefill


@pytest.mark.parametrize(
    "error", [InvalidRequest("no"), PdserveError("a defect", blame=Blame.ROUTER)]
)
def test_errors_that_no_other_node_avoids_are_not_retried(node: Node, error: PdserveError) -> None:
    retries = Retries(LIMIT)
    with pytest.raises(PdserveError):
        retries.node_failed(error, node)
    assert retries.failures == 0
