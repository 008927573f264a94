"""Numbers in nodes' reports: no confused node throttles the routers of all others."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pdserve.common.config.router import RoutingConfig
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.admission import Admission

HUGE = 4_000_000_000
HONEST = {"running": 5, "waiting": 1, "others": 3, "others_tokens": 40, "routers": 2}
ROLES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE}


@pytest.fixture
def registry() -> Registry:
    registry = Registry(RoutingConfig())
    for name in ("p0", "p1", "d0", "d1"):
        report(registry, name)
    return registry


def report(registry: Registry, name: str, **numbers: Any) -> None:
    info = pb.NodeInfo(
        node_id=name, role=ROLES[name[0]], max_model_len=4096, fingerprint="f", kv_connectors=["c"]
    )
    registry.register(info, pb.NodeLoad(healthy=True, **{**HONEST, **numbers}))


def told(registry: Registry) -> tuple[int, ...]:
    view = ClusterView(registry)
    return (*view.placed_by_others(), view.replicas()[2])


def test_reports_are_added_up(registry: Registry) -> None:
    assert told(registry) == (6, 2, 80)  # of the decode nodes, and of the prefill nodes


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ({"others": HUGE}, "of 6 sequences are other routers'"),
        ({"others": HUGE, "running": HUGE}, "sequences, more than 65536"),
        ({"others": 65_000, "running": 65_000, "others_tokens": 2**63}, "lack 9223372036854775808"),
        ({"routers": HUGE}, "routers, more than 64"),
    ],
)
def test_a_report_that_cannot_be_counts_for_nothing_and_is_named(
    registry: Registry, numbers: dict[str, int], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            report(registry, "p1", **numbers)
    assert told(registry) == (6, 2, 40)
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("p1: it reports impossible numbers") and fault in said
    (node,) = [
        each for each in ClusterView(registry).describe()["nodes"] if each["node_id"] == "p1"
    ]
    assert fault in node["reason"] and node["state"] != "lost"
    registry.heartbeat("p1", pb.NodeLoad(healthy=True, **HONEST))
    assert told(registry) == (6, 2, 80)


@pytest.mark.parametrize("numbers", [
    {"running": 65_000, "others": 65_000, "others_tokens": 65_000 * 4096, "routers": 64},
])  # fmt: skip
def test_a_possible_lie_is_bounded_by_what_nodes_alike_report(
    registry: Registry, numbers: dict[str, int]
) -> None:
    report(registry, "p1", **numbers)
    report(registry, "d1", **numbers)
    choices, routers, tokens = told(registry)
    assert choices <= 3 + 32 and routers == 2 and tokens <= 40 + 2**15


def test_a_confused_node_does_not_take_the_slots_of_a_router(registry: Registry) -> None:
    admission = Admission(256, 1000, 60.0)
    report(registry, "d1", others=HUGE, routers=HUGE)
    admission.placed_by_others(*ClusterView(registry).placed_by_others())
    assert admission.places == 256 - 3


def test_the_only_node_of_its_role_counts_in_full(registry: Registry) -> None:
    registry.deregister("d1")
    report(registry, "d0", running=500, others=400)
    assert told(registry)[0] == 400
