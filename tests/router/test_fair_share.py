"""Tokens are shared by weight, within the bounds that `virtual_time.py` states."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise

import pytest

from pdserve.common.core.errors import ConfigError, Overloaded
from pdserve.router.api.auth import APIKeys
from pdserve.router.requests.fair_share import FairShare, Waiter
from pdserve.router.requests.virtual_time import MOST, VirtualTime


class Desk:
    """One place, and who had it: (client, tokens) in order."""

    def __init__(self, weights: dict[str, float] | None = None, places: int = 1) -> None:
        self.share = FairShare(places, overdraw=True, time=VirtualTime(weights))
        self.served: list[tuple[str, int]] = []

    def ask(self, client: str, tokens: int, priority: int = 0) -> None:
        def tell(error: Overloaded | None) -> None:
            assert error is None
            self.served.append((client, tokens))

        self.share.enter(client, Waiter(tell=tell, tokens=tokens, priority=priority))

    def next(self) -> None:
        self.share.release(self.served[-1][0])


@pytest.mark.parametrize("seed", range(20))
def test_backlogged_clients_differ_by_less_than_two_requests(seed: int) -> None:
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 2.0, 7.0]) for name in "abc"}
    largest = {name: rng.choice([10, 1000, 100_000]) for name in "abc"}
    desk, sizes = Desk(weights), {name: [rng.randint(1, largest[name])] for name in "abc"}
    desk.ask("first", 1)
    for name, own in sizes.items():
        own += [rng.randint(1, largest[name]) for _ in range(400)]
        for tokens in own:
            desk.ask(name, tokens)
    got, waiting = Counter[str](), Counter({name: len(own) for name, own in sizes.items()})
    while min(waiting.values()) > 1:  # all three wait
        desk.next()
        name, tokens = desk.served[-1]
        got[name] += tokens
        waiting[name] -= 1
        for one, other in pairwise("abca"):
            apart = abs(got[one] / weights[one] - got[other] / weights[other])
            assert apart <= sum(largest[each] / weights[each] for each in (one, other))


def test_a_newcomer_waits_for_one_piece_of_each_client_that_waits() -> None:
    desk = Desk()
    for _ in range(1000):  # a burst
        desk.ask("burst", 50)
        desk.ask("large", 4000)
    for _ in range(200):
        desk.next()
    before = len(desk.served)
    desk.ask("new", 128_000)
    while desk.served[-1][0] != "new":
        desk.next()
    meanwhile = Counter(name for name, _ in desk.served[before:-1])
    assert meanwhile["large"] <= 1 and meanwhile["burst"] * 50 <= 4000 + 50


def test_idle_capacity_that_a_client_used_is_not_paid_back() -> None:
    """A client that was alone for long is not behind when another one comes."""
    desk = Desk()
    for _ in range(100):
        desk.ask("old", 1000)
        desk.share.release("old")
    desk.ask("old", 1000)
    for _ in range(50):
        desk.ask("new", 1000)
        desk.ask("old", 1000)
    for _ in range(20):
        desk.next()
    counts = Counter(name for name, _ in desk.served[-20:])
    assert abs(counts["old"] - counts["new"]) <= 1


def test_short_prompts_overtake_a_long_one_by_no_more_than_its_own_tokens() -> None:
    desk = Desk()
    desk.ask("a", 1)
    desk.ask("a", 1000)
    for _ in range(300):
        desk.ask("a", 30)
        desk.next()
    at = desk.served.index(("a", 1000))
    assert 1 < at <= 1 + 1000 // 30 + 1
    assert sum(tokens for _, tokens in desk.served[1:at]) <= 1000


def test_a_priority_comes_before_length() -> None:
    desk = Desk()
    desk.ask("a", 1)
    for tokens, priority in ((10, 5), (99, -1), (50, 0), (20, 0), (70, 0)):
        desk.ask("a", tokens, priority)
    for _ in range(5):
        desk.next()
    assert [tokens for _, tokens in desk.served[1:]] == [99, 20, 50, 70, 10]


def test_answers_count_when_they_have_ended() -> None:
    desk = Desk()
    desk.ask("talker", 10)
    for _ in range(5):
        desk.ask("talker", 10)
        desk.ask("reader", 10)
    assert desk.share.time is not None
    desk.share.time.charge("talker", 35)
    for _ in range(5):
        desk.next()
    assert [name for name, _ in desk.served[1:]] == ["reader"] * 5


def test_clients_without_end_are_forgotten() -> None:
    time = VirtualTime()
    for number in range(5 * MOST):
        time.charge(f"client {number}", 10**6)
        time.serve(f"client {number}", 1)
    assert len(time) <= MOST


def test_keys_have_weights() -> None:
    keys = APIKeys("one, two", weights="1,2.5")
    names = [keys.client(f"Bearer {key}", None) for key in ("one", "two")]
    assert [keys.weights[name] for name in names] == [1.0, 2.5]
    assert APIKeys("one").weights == {}


@pytest.mark.parametrize(
    "weights", ["", "0,1", "-1,1", "nan,1", "inf,1", "a,b", "1;2", "1,2,3", "1"]
)
def test_weights_that_cannot_be(weights: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-weights"):
        APIKeys("one,two", weights=weights)


async def test_a_call_that_is_cancelled_as_its_turn_comes_holds_nothing() -> None:
    share = FairShare(1)
    await share.acquire("a")
    call = asyncio.create_task(share.acquire("b"))
    await asyncio.sleep(0)
    assert share.waiting == 1
    share.release("a")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert share.has_room("c")
