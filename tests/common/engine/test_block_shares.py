"""Clients share a replica's KV blocks: the policy with plain numbers, and the scheduler with it."""

from __future__ import annotations

import pytest
from test_fair_queue import BLOCK, Engine

from pdserve.common.engine.block_shares import LATELY, RESERVED, BlockShares
from pdserve.common.engine.sequence import Sequence, Status

HOG, ANOTHER = "hog", "another"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shares(*held: tuple[str, int], blocks: int = 80, clock: Clock | None = None) -> BlockShares:
    found = BlockShares(blocks, clock or Clock())
    found.update(held)
    return found


# ---- the policy ----


def test_a_client_that_is_alone_may_use_all_blocks() -> None:
    alone = shares((HOG, 70), (HOG, 10))
    assert not alone.contended
    assert alone.reserved(HOG) is None
    assert alone.rank(HOG) == 0


def test_a_client_above_its_share_leaves_the_reserve_and_comes_later() -> None:
    two = shares((HOG, 30), (HOG, 11), (ANOTHER, 0))
    assert two.share == 40
    assert two.reserved(HOG) == RESERVED
    assert two.reserved(ANOTHER) is None
    assert two.rank(ANOTHER) == 0 < two.rank(HOG)
    assert two.yields(HOG, ANOTHER)
    assert not two.yields(ANOTHER, HOG)


def test_clients_below_their_share_have_no_order_between_them() -> None:
    two = shares((HOG, 39), (ANOTHER, 3))
    assert two.rank(HOG) == two.rank(ANOTHER) == 0
    assert two.reserved(HOG) is None


def test_of_clients_above_their_share_the_one_that_uses_least_comes_first() -> None:
    many = shares((HOG, 50), ("second", 28), *((str(i), 0) for i in range(10)))
    assert 0 == many.rank("3") < many.rank("second") < many.rank(HOG)
    assert many.yields(HOG, "second")
    assert not many.yields("second", HOG)


def test_the_only_sequence_of_a_client_need_not_leave_the_reserve() -> None:
    """It could never be computed, if it needs nearly all blocks."""
    two = shares((HOG, 78), (ANOTHER, 0))
    assert two.reserved(HOG, own=1) is None
    assert two.reserved(HOG) == RESERVED, "but a second one must"


def test_blocks_count_by_the_time_they_were_held_which_fades() -> None:
    clock = Clock()
    two = shares((HOG, 80), (ANOTHER, 0), clock=clock)
    clock.now += LATELY
    two.update(((HOG, 0), (ANOTHER, 0)))
    assert two.use(HOG) == pytest.approx(80 * (1 - 0.3679), rel=1e-3)
    assert two.yields(HOG, ANOTHER)
    clock.now += LATELY
    two.update(((HOG, 0), (ANOTHER, 0)))
    assert not two.yields(HOG, ANOTHER)


def test_the_time_alone_does_not_count() -> None:
    clock = Clock()
    one = shares((HOG, 80), clock=clock)
    clock.now += 100 * LATELY
    one.see(ANOTHER)
    one.update(((HOG, 4), (ANOTHER, 0)))
    assert one.use(HOG) == 4


def test_a_client_is_forgotten_after_its_last_sequence() -> None:
    clock = Clock()
    two = shares((HOG, 80), (ANOTHER, 1), clock=clock)
    clock.now += LATELY * 0.9
    two.update(((HOG, 80),))
    assert two.contended
    clock.now += LATELY * 0.2
    two.update(((HOG, 80),))
    assert not two.contended


# ---- the scheduler ----


def run(engine: Engine, tokens: int) -> int:
    """Takes a step, then ends the sequences with so many tokens; returns how many it ended."""
    engine.step()
    ended = [each for each in engine.scheduler.running if each.num_output_tokens >= tokens]
    for each in ended:
        engine.scheduler.release(each)
    engine.scheduler.admit()
    return len(ended)


def crowded(seqs: int = 16, blocks: int = 260, remote: bool = False) -> Engine:
    """Returns an engine whose blocks one client has used up for a while."""
    engine = Engine(seqs=seqs, blocks=blocks)
    for _ in range(200):
        engine.ask(HOG, prompt=8, remote=remote)
    return engine


def has_blocks(sequence: Sequence) -> bool:
    return sequence.status in (Status.RUNNING, Status.REMOTE)


@pytest.mark.parametrize("remote", [False, True])
def test_a_short_request_waits_for_at_most_one_reservation_of_a_block_hog(remote: bool) -> None:
    """The hog's sequences need 31 blocks each in the end, so they preempt each other. The short
    requests come one after the other."""
    engine = crowded()
    for _ in range(150):
        run(engine, tokens=120)
    assert engine.scheduler.num_preemptions, "blocks are short"
    late = []
    for _ in range(30):
        one = engine.ask(ANOTHER, prompt=2 * BLOCK, remote=remote)
        admitted, ended = engine.scheduler.num_admitted, 0
        while not has_blocks(one):
            ended += run(engine, tokens=120)
        late.append(max(ended, engine.scheduler.num_admitted - admitted - 1))
        for _ in range(4):
            run(engine, tokens=120)
        engine.scheduler.release(one)
    assert max(late) <= 1
    assert sum(late) <= 1, "the reserve is kept for the next one"


def test_another_client_beside_two_block_hogs_finds_blocks_at_once() -> None:
    engine = Engine(seqs=32, blocks=260)
    for _ in range(100):
        engine.ask(HOG, prompt=8)
        engine.ask("second", prompt=8)
    for _ in range(150):
        run(engine, tokens=120)
    for _ in range(20):
        one = engine.ask(ANOTHER, prompt=2 * BLOCK)
        for _ in range(BLOCK):
            run(engine, tokens=120)
        assert has_blocks(one) or one.status is Status.DONE
        engine.scheduler.release(one)


def test_a_hog_does_not_overtake_a_client_that_waits_for_blocks() -> None:
    engine = Engine(seqs=8, blocks=40)
    engine.ask(HOG, prompt=30 * BLOCK)
    large = engine.ask(ANOTHER, prompt=12 * BLOCK)
    small = engine.ask(HOG, prompt=2 * BLOCK)
    assert large.status is small.status is Status.WAITING


def test_one_sequence_may_use_all_blocks_beside_another_client() -> None:
    """It ends, however large."""
    engine = Engine(seqs=4, blocks=32)
    large = engine.ask(HOG, prompt=20 * BLOCK)
    for _ in range(30):
        one = engine.ask(ANOTHER, prompt=1)
        run(engine, tokens=40)
        engine.scheduler.release(one)
    while large.status is not Status.DONE:
        run(engine, tokens=11 * BLOCK)
    assert not engine.scheduler.num_preemptions
    assert engine.scheduler.pool.num_free == 32


def test_a_client_that_is_alone_is_computed_as_without_shares() -> None:
    """It uses the reserve, too."""
    engine, least = crowded(), 260
    while not engine.scheduler.num_preemptions:
        run(engine, tokens=120)
        least = min(least, engine.scheduler.pool.num_free)
    assert least < 260 // RESERVED // 2
