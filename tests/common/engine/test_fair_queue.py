"""Clients share one replica: one with many requests leaves the others their seats and turns."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from test_scheduler import land

from one_group import one_group
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.fair_queue import ClientSlots
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence, Status

BLOCK = 4


class Engine:
    """A scheduler and ranks whose every sampled token is 7."""

    def __init__(self, seqs: int, blocks: int = 4096, tokens: int = 4096, stages: int = 1) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=max(tokens, seqs))
        pool = one_group(blocks, BLOCK, prefix_caching=False)
        self.scheduler = Scheduler(pool, config, (0,), stages)
        self._ids = count()

    def ask(self, client: str, prompt: int = 3, remote: bool = False) -> Sequence:
        params = SamplingParams(max_tokens=1000)
        sequence = Sequence(
            next(self._ids), params, [1] * prompt, prompt, client=client, remote=remote
        )
        self.scheduler.add(sequence)
        self.scheduler.admit()
        return sequence

    def step(self) -> list[Sequence]:
        """Returns the sequences that it took something of."""
        self.scheduler.admit()
        batch = self.scheduler.schedule()
        assert batch is not None
        by_id = {each.seq_id: each for each in self.scheduler.running}
        taken = [by_id[entry.seq_id] for entry in batch.sequences]
        land(self.scheduler, batch)
        return taken

    def until_drawn(self, *sequences: Sequence) -> int:
        """Steps until they have their first tokens."""
        for steps in range(10_000):
            if all(each.num_output_tokens for each in sequences):
                return steps
            self.step()
        raise AssertionError("never")

    def seated(self, client: str) -> int:
        computed = [*self.scheduler.running, *self.scheduler.remote]
        return sum(each.client == client for each in computed)


def test_a_client_that_is_alone_fills_every_step_and_has_no_more_seats():
    for seqs in range(1, 70):
        seats, taken = ClientSlots(seqs, ()), 0
        while seats.has_room("greedy"):
            seats.take("greedy")
            taken += 1
        assert taken == seqs
        assert seats.has_room("another")


@pytest.mark.parametrize("greedy", [1, 2, 5])
def test_a_newcomer_finds_a_seat_beside_greedy_clients(greedy: int):
    engine = Engine(seqs=64)
    for _ in range(200):
        for number in range(greedy):
            engine.ask(f"greedy {number}", remote=number % 2 == 0)
    seats = [engine.seated(f"greedy {number}") for number in range(greedy)]
    assert max(seats) - min(seats) <= 1
    assert sum(seats) >= 64
    assert engine.ask("another").status is Status.RUNNING


def test_routers_that_name_no_client_have_the_seats_of_one():
    engine = Engine(seqs=4)
    for _ in range(10):
        engine.ask("")
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (4, 6)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_computes_no_more_than_it_may_and_all_that_run_get_the_same(stages: int):
    engine = Engine(seqs=8, stages=stages)
    for _ in range(20):
        for client in "abc":
            engine.ask(client)
    running = list(engine.scheduler.running)
    assert len(running) > 8
    engine.until_drawn(*running)
    taken: Counter[int] = Counter()
    for _ in range(len(running)):
        step = engine.step()
        assert len(step) <= 8
        taken.update(each.seq_id for each in step)
    assert max(taken.values()) - min(taken[each.seq_id] for each in running) <= 1


@pytest.mark.parametrize("seqs", [1, 2, 3, 4, 8])
def test_neither_prompts_nor_those_that_decode_are_kept_out_of_full_steps(seqs: int):
    engine = Engine(seqs, tokens=8)
    decoding = [engine.ask("greedy") for _ in range(seqs)]
    engine.until_drawn(*decoding)
    had = sum(each.num_output_tokens for each in decoding)
    prompt = engine.ask("another", prompt=80)
    steps = engine.until_drawn(prompt)
    assert steps <= 2 * -(-80 // max(1, 8 - seqs)) or seqs == 8
    assert sum(each.num_output_tokens for each in decoding) - had >= steps // 2


def test_a_client_s_many_prompts_wait_their_turns_beside_another_s():
    """All have one length, each of four steps: 40 of one client, then one of another."""
    engine = Engine(seqs=64, tokens=64)
    many = [engine.ask("greedy", prompt=256) for _ in range(40)]
    engine.step()
    one = engine.ask("another", prompt=256)
    assert engine.until_drawn(one) <= 2 * 4 + 1
    assert sum(each.num_output_tokens > 0 for each in many) <= 2


def test_clients_take_turns_in_the_queue_for_blocks():
    engine = Engine(seqs=64, blocks=4)
    first = engine.ask("greedy", prompt=4 * BLOCK)
    waiting = [engine.ask("greedy", prompt=4 * BLOCK) for _ in range(5)]
    other = [engine.ask("another", prompt=4 * BLOCK) for _ in range(2)]
    order: list[str] = []
    present = [first, *waiting, *other]
    while present:
        (running,) = engine.scheduler.running
        order.append(running.client)
        present.remove(running)
        engine.scheduler.release(running)
        engine.scheduler.admit()
    assert order == [*["greedy", "another"] * 2, *["greedy"] * 4]


def test_of_equals_the_client_that_has_most_is_preempted():
    """Its youngest, though the other client's is younger still."""
    engine = Engine(seqs=8, blocks=11)
    greedy = [engine.ask("greedy", prompt=2 * BLOCK - 1) for _ in range(3)]
    one = engine.ask("another", prompt=2 * BLOCK - 1)
    engine.until_drawn(*greedy, one)
    for _ in range(8):  # twice each needs a block more, and three are free
        engine.step()
    assert greedy[2].status is Status.WAITING
    assert one.num_tokens == max(each.num_tokens for each in greedy)
