"""The last two minutes, for the page: counts, events, their bounds, and several workers as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_router_policy import add
from yarl import URL

from fake_nodes import fails, fake_cluster
from fakes_pipeline import byte_level_folder
from http_site import serve
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.node_events import MAX_EVENTS, MAX_FAULTS, MAX_TEXT
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.admission import PREDICTED_FOR, Admission, Ask
from pdserve.router.requests.history import KEPT, MAX_LABELS, History
from pdserve.router.workers.merge import merged_histories


class Watched:
    """A history over a registry with a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.registry = Registry(RoutingConfig(heartbeat_timeout=5), now=lambda: self.now)
        self.metrics = RouterMetrics()
        admission = Admission(8, 8, 1.0, clock=lambda: self.now)
        self.history = History(self.metrics, ClusterView(self.registry), admission)

    def tick(self) -> dict[str, Any]:
        self.now += 1
        self.history.sample(self.now)
        return self.history.since(0)["samples"][-1]

    def events(self) -> list[str]:
        return [each["text"] for each in self.history.since(0)["events"]]


async def test_a_sample_counts_what_came_in_its_second(tmp_path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        history = cluster.pipeline.history
        history.sample(1.0)
        await cluster.ask(max_tokens=8)
        history.sample(2.0)
        history.sample(3.0)
        found = history.since(0)
        _, busy, idle = found["samples"]
        assert found["served"] == 1
        assert [each["at"] for each in history.since(2)["samples"]] == [3]
    assert busy["codes"] == {"OK": 1} and busy["tokens"] == 8
    assert busy["prompt_tokens"] >= busy["cached_tokens"] >= 0 < busy["prompt_tokens"]
    for name in ("ttft", "hand_off"):
        assert sum(busy[name].values()) == 1 and idle[name] == {}
    assert sum(busy["itl"].values()) == 7
    assert idle["codes"] == {} and idle["tokens"] == idle["prompt_tokens"] == 0


async def test_slo_outcomes_and_errors_are_in_it(tmp_path) -> None:
    options = {"slo_ttft": 1e-6, "queue_timeout": 0.2}
    async with fake_cluster(tmp_path, ("p0", "d0"), **options) as cluster:
        history = cluster.pipeline.history
        await cluster.ask()
        history.sample(1.0)
        cluster["d0"].on_run = fails(NodeError("no", blame=Blame.DECODE))
        with pytest.raises(PdserveError) as error:
            await cluster.ask()
        history.sample(2.0)
        first, second = history.since(0)["samples"]
        moves = [each["text"] for each in history.since(0)["events"] if each["own"]]
    assert first["slo"]["ttft/missed"] == 1 and first["codes"] == {"OK": 1}
    assert second["codes"] == {error.value.code: 1}
    assert moves and moves[0].endswith("to other nodes: NODE_FAILED of a decode node")


def test_nodes_that_come_change_and_leave_are_events() -> None:
    world = Watched()
    add(world.registry, "p0", pb.ROLE_PREFILL)
    add(world.registry, "d0", pb.ROLE_DECODE)
    world.tick()
    world.tick()
    assert world.events() == ["p0 registered: ready", "d0 registered: ready"]
    world.registry.heartbeat("d0", pb.NodeLoad(healthy=False, reason="a rank died"))
    world.tick()
    assert world.events()[2:] == ["d0 is unhealthy: a rank died"]
    world.now += 10
    world.tick()
    assert set(world.events()[3:]) == {"p0 is lost", "d0 is lost"}
    world.registry.deregister("d0")
    world.tick()
    assert world.events()[-1] == "d0 has left"


def test_the_history_is_bounded() -> None:
    world = Watched()
    for number in range(3 * KEPT):
        for code in range(3 * MAX_LABELS):
            world.metrics.requests.labels(f"CODE_{number % 2}_{code}").inc()
        node_id = f"d{number}" + "\x1b[2J<script>" * 100
        add(world.registry, node_id)
        world.registry.refusals.note(f"reason {number}" + "x" * 5000)
        world.tick()
        world.registry.deregister(node_id)
    found = world.history.since(0)
    assert len(found["samples"]) == KEPT
    assert len(found["events"]) == MAX_EVENTS + MAX_FAULTS
    assert max(len(each["text"]) for each in found["events"]) <= MAX_TEXT
    assert not any("\x1b" in each["text"] for each in found["events"])
    assert len(found["samples"][-1]["codes"]) == MAX_LABELS + 1
    assert sum(found["samples"][-1]["codes"].values()) == 3 * MAX_LABELS
    assert len(json.dumps(found)) < 300_000


def test_strangers_refusals_drive_out_no_other_event() -> None:
    world = Watched()
    add(world.registry, "p0", pb.ROLE_PREFILL)
    for number in range(2 * MAX_EVENTS):
        world.registry.refusals.note(f"reason {number}")
        world.tick()
    assert "p0 registered: ready" in world.events()


def test_one_refusal_is_one_event_until_it_is_over() -> None:
    world = Watched()
    for _ in range(5):
        world.registry.refusals.note("no key")
        world.tick()
    assert world.events() == ["a node was refused: no key"]


def test_tokens_that_nodes_made_before_this_router_started_do_not_count() -> None:
    world = Watched()
    add(world.registry, "d0", generation_tokens=1000)
    assert world.tick()["nodes_tokens"] == 0
    world.registry.heartbeat("d0", pb.NodeLoad(healthy=True, generation_tokens=1040))
    assert world.tick()["nodes_tokens"] == 40
    world.registry.heartbeat("d0", pb.NodeLoad(healthy=True, generation_tokens=3))  # impossible
    assert world.tick()["nodes_tokens"] == 0


def test_a_clock_that_is_set_back_repeats_no_second() -> None:
    world = Watched()
    world.tick()
    world.now -= 500
    world.tick()
    at = [each["at"] for each in world.history.since(0)["samples"]]
    assert at == [1001, 1002]


def test_a_prediction_expires() -> None:
    now = 0.0
    admission = Admission(8, 8, 1.0, clock=lambda: now)
    for number in range(6):
        ask = Ask(tokens=100 + number, tell=lambda error: None)
        admission.enter(ask)
        now += 0.5
        admission.first_token(ask)
        admission.leave(ask)
    assert admission.newcomer_ttft() == pytest.approx(0.5, rel=0.2)
    now += PREDICTED_FOR - 1
    assert admission.newcomer_ttft() is not None
    now += 2
    assert admission.newcomer_ttft() is None


# ---- several workers ----


def history_of(*samples: dict[str, Any], events: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {
        "bounds": {"ttft": [1.0]},
        "served": 5,
        "samples": list(samples),
        "events": list(events),
    }


def sample(at: int, tokens: int, all_tokens: int, code: str) -> dict[str, Any]:
    return {"at": at, "tokens": tokens, "nodes_tokens": all_tokens, "codes": {code: tokens}}


def test_workers_histories_are_one() -> None:
    lost = [
        {"at": at, "tone": "bad", "text": "d0 is lost", "own": False} for at in (7.0, 8.0, 99.0)
    ]
    moved = [{"at": at, "tone": "warn", "text": "1 moves", "own": True} for at in (7.5, 7.6)]
    merged = merged_histories([
        history_of(sample(1, 2, 9, "OK"), sample(2, 1, 9, "OK"), events=(lost[1], moved[0])),
        history_of(sample(1, 3, 8, "OVERLOADED"), events=(lost[0], moved[1], lost[2])),
    ])  # fmt: skip
    assert merged["samples"] == [
        {"at": 1, "tokens": 5, "nodes_tokens": 9, "codes": {"OK": 2, "OVERLOADED": 3}}
    ], "the other worker has not had second 2 yet: half of it is not shown"
    assert merged["served"] == 10
    assert [each["at"] for each in merged["events"]] == [7.0, 7.5, 7.6, 99.0]


def test_a_worker_that_hangs_does_not_hold_the_others_up() -> None:
    histories = [history_of(sample(1, 2, 2, "OK")), history_of(sample(50, 3, 3, "OK"))]
    assert [each["at"] for each in merged_histories(histories)["samples"]] == [1, 50]
    assert merged_histories([history_of(), history_of()])["samples"] == []


async def test_a_time_that_is_none_is_refused(tmp_path) -> None:
    async with serve(byte_level_folder(tmp_path)) as site:
        for since in ("x", "", "nan", "inf", "-1e999", "1,5", "²"):
            url = URL(f"{site.url}/v1/cluster/history").with_query(since=since)
            async with site.session.get(url) as response:
                assert response.status == 400, since
                assert (await response.json())["error"]["param"] == "since"
