"""Requests whose SLO cannot be kept are refused before anything is computed. A clock that stands
still, and nodes that compute a prompt after the other."""

from __future__ import annotations

import asyncio
import heapq
import math
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from clock import Clock
from fake_nodes import FakeCluster, fails, fake_cluster, hangs, once
from pdserve.common.core.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.router.requests.admission import OUTDATED, Admission, Ask
from pdserve.router.requests.forecast import LEAST, Line
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.slo import NO_SLO, SLO, Promise, slo_of
from pdserve.router.requests.stages import RequestArrival, arrival_var
from waiting import eventually

TWO_SECONDS = SLO(ttft=2.0)
RATE = 1000.0  # tokens a second
REFUSAL = InvalidRequest("a node refuses it for good")


class Prefill:
    """One node, which computes prompts in the order in which it gets them."""

    def __init__(self, slo: SLO = TWO_SECONDS, backlog: float = 0.5, **options: object) -> None:
        self.clock = Clock(0.0)
        self.admission = Admission(
            *(256, 256, 30.0, 1.0),
            slo=slo,
            prefill_backlog=backlog,
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )
        self.free_at, self.numbers = 0.0, count()
        self.events: list[tuple[float, int, Ask]] = []
        self.refused: list[tuple[Ask, Overloaded]] = []

    def ask(self, tokens: int, client: str = "a", slo: SLO = NO_SLO, **more: object) -> Ask:
        ask = Ask(
            batch=Batch(client, tokens),
            tokens=tokens,
            prompt_tokens=tokens,
            slo=slo,
            **more,  # type: ignore[arg-type]
        )
        ask.tell = lambda error: self._told(ask, error)
        try:
            self.admission.enter(ask)
        except Overloaded as error:
            self.admission.leave(ask)
            self.refused.append((ask, error))
        return ask

    def _told(self, ask: Ask, error: Overloaded | None) -> None:
        if error is not None:
            self.refused.append((ask, error))
            return
        self.free_at = max(self.free_at, self.clock.time) + ask.tokens / RATE
        heapq.heappush(self.events, (self.free_at, next(self.numbers), ask))

    def run(self, until: float = math.inf) -> None:
        """Until then, or until all is computed."""
        while self.events and self.events[0][0] <= until:
            self.clock.time, _, ask = heapq.heappop(self.events)
            self.admission.first_token(ask)
            self.admission.leave(ask)
        self.clock.time = (
            min(until, max(self.clock.time, until)) if until < math.inf else self.clock.time
        )

    def warm(self) -> None:
        for number in range(LEAST + 1):
            self.ask(100 + 100 * number)
            self.run()


def test_late_requests_are_refused_and_admitted_ones_are_in_time() -> None:
    node = Prefill()
    node.warm()
    asked = [node.ask(400) for _ in range(20)]
    assert 4 <= 20 - len(node.refused) <= 5  # of 400 tokens each, within 2 s
    node.run()
    refused = {ask for ask, _ in node.refused}
    taken = [ask for ask in asked if ask not in refused]
    assert all(ask.ttft is not None and ask.ttft <= 2.0 for ask in taken)
    for ask in taken:
        assert ask.predicted == pytest.approx(ask.ttft, rel=0.05)


def test_a_refusal_says_when_to_come_again() -> None:
    node = Prefill(SLO(ttft=1.0))
    node.warm()
    for client in "abcd":
        node.ask(900, client)
    errors = [error for _, error in node.refused]
    assert errors and all(error.code == "SLO_TTFT" for error in errors)
    assert all(error.http_status == 429 and error.retry_after >= 1.0 for error in errors)
    assert "the first token would come in" in errors[0].message
    late = node.ask(900, slo=SLO(ttft=0.001, own=True))
    assert node.refused[-1][0] is late


def test_nothing_is_refused_before_anything_was_measured() -> None:
    node = Prefill(SLO(ttft=0.001))
    for _ in range(LEAST):
        node.ask(1000)
    assert not node.refused


def test_no_prompt_is_too_long_for_the_server_s_slo_but_for_its_own() -> None:
    node = Prefill(SLO(ttft=0.5))
    node.warm()
    node.ask(1000)  # takes a second alone
    node.run()
    assert not node.refused
    node.ask(1000, slo=SLO(ttft=0.5, own=True))
    assert [error.code for _, error in node.refused] == ["SLO_TTFT"]


def test_a_size_that_is_not_known_is_tried_once_at_a_time() -> None:
    node = Prefill(SLO(ttft=1.0, own=True))
    node.warm()
    node.ask(600)
    first, second = node.ask(50_000), node.ask(50_000)
    assert [ask for ask, _ in node.refused] == [second]
    node.run()
    assert first.ttft == pytest.approx(50.6)


def test_a_slow_time_does_not_refuse_for_ever() -> None:
    """Refused prompts measure nothing, so after some time one is tried."""
    node, own = Prefill(), SLO(ttft=0.5, own=True)
    for _ in range(50):  # each took ten seconds
        node.admission.forecast.backlog.line.add(100, 10.0)
    node.ask(100)  # measured now, by a node that is fast again
    node.run()
    node.ask(100, slo=own)
    ((_, error),) = node.refused
    assert error.retry_after == OUTDATED
    node.clock.time += error.retry_after
    tried, beside = node.ask(100, slo=own), node.ask(100, slo=own)
    assert [ask for ask, _ in node.refused[1:]] == [beside]
    node.run()
    assert tried.ttft == pytest.approx(0.1)
    for _ in range(2 * LEAST):
        node.ask(100, slo=own)
        node.run()
    assert len(node.refused) == 2


def test_no_prompt_is_tried_while_others_are_measured() -> None:
    node, own = Prefill(), SLO(ttft=0.5, own=True)
    node.warm()
    node.ask(20_000)
    node.clock.time += 2 * OUTDATED - 1
    node.ask(600, slo=own)
    (_, error) = node.refused[-1]
    assert error.retry_after < OUTDATED


def test_short_prompts_do_not_wait_for_a_long_one_by_the_prediction() -> None:
    """Nodes give half of each step to shorter prompts."""
    node = Prefill(SLO(ttft=2.0))
    node.warm()
    node.ask(1000)
    node.ask(128_000)
    assert not node.refused
    node.ask(100, "b")
    assert not node.refused


def test_an_itl_bounds_the_choices_in_flight() -> None:
    node = Prefill(SLO(itl=0.05), backlog=10.0)
    held: list[Ask] = []
    for number in (*range(1, 21), *range(20, 1, -1)):  # a token takes 10 ms, and 2 ms a choice
        while len(held) < number:
            held.append(node.ask(1))
            node.admission.first_token(held[-1])
        while len(held) > max(0, number - 2):
            ask = held.pop(0)
            ask.itl = 0.01 + 0.002 * number
            node.admission.leave(ask)
    assert 15 <= node.admission.places <= 25
    for ask in held:
        node.admission.leave(ask)
    strict = [node.ask(1, slo=SLO(itl=0.02)) for _ in range(12)]
    assert {error.code for _, error in node.refused} == {"SLO_ITL"}
    assert 3 <= len(strict) - len(node.refused) <= 7


def test_a_key_that_floods_costs_another_one_no_promise() -> None:
    node = Prefill(SLO(ttft=2.0), backlog=0.2)
    node.warm()
    for second in range(20):
        for _ in range(50):
            node.ask(200, "flood")
        polite = node.ask(200, "polite")
        assert polite not in [ask for ask, _ in node.refused]
        node.run(node.clock.time + 1.0)
        assert polite.ttft is not None and polite.ttft <= 1.0, second


def test_a_line_is_found_and_followed() -> None:
    line = Line()
    for x in (10, 500, 20, 800, 40, 100):
        line.add(x, 0.1 + 0.001 * x)
    assert line.at(1000) == pytest.approx(1.1) and line.doubt < 1e-9
    assert line.knows(1500) and not line.knows(1700)
    for x in (10, 500, 20, 800, 40, 100) * 60:
        line.add(x, 0.2 + 0.003 * x)
    assert line.at(1000) == pytest.approx(3.2, rel=0.02)
    alike = Line()
    for _ in range(10):
        alike.add(100, 0.2)
    assert alike.at(50) == pytest.approx(0.1)
    for x, y in ((0, 0.0), (0, 0.5), (10, 0.0), (1, 9.0)):
        alike.add(x, y)
        assert alike.fixed >= 0 and alike.slope >= 0


@pytest.mark.parametrize("text", ["", "abc", "-1", "0", "nan", "inf", "1e300", "2;3", "1_000", "٣"])
@pytest.mark.parametrize("name", ["X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"])
def test_headers_that_cannot_be(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        slo_of({name: text}.get)
    assert caught.value.param == name


def test_headers_of_a_request_take_precedence() -> None:
    own = slo_of({"X-SLO-TTFT-Ms": "1500"}.get)
    assert SLO(ttft=2.0, itl=0.05).overridden(own) == SLO(1.5, 0.05, own=True)
    assert slo_of({}.get) == SLO()


# ---- what is counted ----


def test_outcomes_are_by_the_limit_whatever_was_promised() -> None:
    both = SLO(ttft=1.0, itl=0.1)
    for promise in Promise:
        outcomes = list(both.outcomes(promise, 1.5, 9.0, 0.05))
        assert outcomes == [("ttft", "missed", promise), ("itl", "met", "limit")]
    assert list(NO_SLO.outcomes(Promise.NONE, 1.0, 1.0, 1.0)) == []

    def ttft(first: float | None, waited: float) -> str:
        ((_, outcome, _),) = SLO(ttft=1.0).outcomes(Promise.NONE, first, waited, None)
        return outcome

    assert [ttft(1.0, 9.0), ttft(None, 0.5), ttft(None, 1.5)] == ["met", "unmeasured", "missed"]
    assert list(SLO(itl=0.1).outcomes(Promise.LIMIT, 1.0, 1.0, None)) == [
        ("itl", "unmeasured", "limit")
    ]


def test_a_longer_promise_than_the_limit_is_called_extended() -> None:
    node = Prefill(SLO(ttft=0.5))
    first = node.ask(400)
    node.run()
    node.warm()
    short, long = node.ask(100), node.ask(1000)  # the longer one takes a second alone
    node.run()
    own, trial = SLO(ttft=0.5, own=True), node.ask(5000, slo=SLO(ttft=0.5, own=True))
    node.run()
    asked = [first, short, long, trial, node.ask(100, slo=own)]
    assert [each.promise for each in asked] == ["none", "limit", "extended", "none", "limit"]


def counted(cluster: FakeCluster) -> dict[tuple[str, str, str], float]:
    """Returns (slo, outcome, promise) → count, without zeros."""
    (metric,) = cluster.metrics.slo_requests.collect()
    return {
        (each.labels["slo"], each.labels["outcome"], each.labels["promise"]): each.value
        for each in metric.samples
        if each.name.endswith("_total") and each.value
    }


async def test_answers_later_than_slo_ttft_count_as_missed(tmp_path: Path) -> None:
    """Even if the router promised more, as for prompts that alone take longer than the limit."""
    async with fake_cluster(tmp_path, ("p0", "d0"), slo_ttft=1e-6) as cluster:
        for _ in range(2 * LEAST + 2):
            await cluster.ask()
        assert counted(cluster) == {
            ("ttft", "missed", "none"): LEAST,
            ("ttft", "missed", "extended"): LEAST + 2,
        }


async def test_a_request_is_counted_by_its_own_limits(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), slo_ttft=1e-6, slo_itl=1e-9) as cluster:
        arrival_var.set(RequestArrival(slo=slo_of({"X-SLO-TTFT-Ms": "60000"}.get)))
        await cluster.ask(max_tokens=1)
        arrival_var.set(RequestArrival(slo=slo_of({"X-SLO-TPOT-Ms": "60000"}.get)))
        await cluster.ask()
        assert counted(cluster) == {
            ("ttft", "met", "none"): 1,
            ("ttft", "missed", "none"): 1,
            ("itl", "unmeasured", "limit"): 1,  # an answer of one token
            ("itl", "met", "limit"): 1,
        }


async def test_failed_and_aborted_requests_have_an_outcome(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), slo_ttft=60, slo_itl=60) as cluster:
        cluster["d0"].on_run = once(fails(REFUSAL))
        with pytest.raises(PdserveError):
            await cluster.ask()
        unmeasured = {("ttft", "unmeasured", "none"): 1.0, ("itl", "unmeasured", "limit"): 1.0}
        assert counted(cluster) == unmeasured
        cluster["d0"].on_token[4] = hangs
        asking = asyncio.create_task(cluster.ask())
        await eventually(lambda: cluster.heard.total() >= 4)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        # Its first token came in time; the pace of an answer that stood still is not known.
        assert counted(cluster) == {
            ("ttft", "met", "none"): 1,
            ("ttft", "unmeasured", "none"): 1,
            ("itl", "unmeasured", "limit"): 2,
        }


async def test_a_request_that_waited_longer_than_the_limit_has_missed_it(
    tmp_path: Path,
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), slo_ttft=1e-6) as cluster:
        cluster["d0"].on_run = once(fails(REFUSAL))
        with pytest.raises(PdserveError):
            await cluster.ask()
        assert counted(cluster) == {("ttft", "missed", "none"): 1}
