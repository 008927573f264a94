"""Which sequences are computed in the next step. Policy only: no tensors, no I/O.

A step has a budget of tokens. Sequences that decode get one token each, first, so a long
prompt never stalls them (where more run than a step computes, those that have waited longest);
what is left goes to prompts, in chunks (chunked prefill,
Sarathi-Serve, OSDI'24), shared so that neither a long one nor many short ones keep others waiting
(`share_budget`). A sequence is admitted only when blocks for all its present tokens are free;
while it waits for them, shorter ones may overtake it a little. A decoding sequence that needs one
more block when none is free preempts the least urgent one, of equals the youngest, which gives its
blocks back and computes its tokens again later.

A pipeline has a step for each of its stages in flight (micro-batches, as in GPipe,
arXiv:1811.06965). A step then takes only its share of what there is to do, or one would take all
and the other stages had nothing; but no token depends on one that is in flight still: a prompt's
next chunk may follow at once, for every stage computes steps in order, while a sampled token must
come back first.

    WAITING ──admit──▶ RUNNING ──hold──▶ HELD ──release──▶ DONE
      │  ▲                │  ▲
      │  └────preempt─────┘  └────────activate────────┐
      └──admit, its KV comes from another node──▶ REMOTE ──hold──▶ HELD
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from time import monotonic

from pdserve.common.config.node import SchedulerConfig
from pdserve.common.core.sampling import SampledToken
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import SequenceDelta, StepDelta
from pdserve.common.engine.prompt_budget import share_budget
from pdserve.common.engine.sequence import Sequence, Status
from pdserve.common.engine.speculation import NO_DRAFT, Draft, Speculator
from pdserve.common.engine.step_builder import StepBuilder
from pdserve.common.engine.turns import Seats, in_turn, next_turn, prompt_seats

QUEUE_WINDOW = 64
"""Sequences behind the head of the queue that may be admitted when it does not fit."""
MIN_CHUNK = 64
"""Tokens below which a prompt is not cut for a pipeline: reading the weights takes as long."""


class Scheduler:
    """Owns the status, the block table and the progress of every sequence added to it."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        micro_batches: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        """`micro_batches` is the number of steps that may be in flight at once; who guesses is the
        `speculator`."""
        self.pool = pool
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.micro_batches = micro_batches
        self.speculator = speculator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.remote: set[Sequence] = set()
        # Totals since start, for the watchdog and the metrics.
        self.num_admitted = 0
        self.num_freed = 0  # blocks given back by sequences that are over
        self.num_preemptions = 0
        self.num_failed = 0  # sequences whose share of a step could not be computed
        self.prompt_tokens = 0  # computed here, recomputation after a preemption included
        self.generation_tokens = 0  # that sequences got here
        self.cache_queries = 0  # prompt tokens looked up in the prefix cache
        self.cache_hits = 0  # prompt tokens found there
        self._steps = StepBuilder(eos_token_ids)

    @property
    def computed_steps(self) -> StepShape:
        """All that was told to the ranks, since start."""
        return self._steps.computed

    # ---- entering and leaving -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """By priority; of equals those that another node has begun come before those that have
        waited for no token yet, then clients take turns; of one client first come, first served."""
        sequence.status = Status.WAITING
        sequence.turn = next_turn(sequence.client, self.waiting, self._prompts())
        ahead = sum(_turn(each) <= _turn(sequence) for each in self.waiting)
        self.waiting.insert(ahead, sequence)

    def admit(self) -> list[Sequence]:
        """Gives blocks to the sequences at the head of the queue, while they last; then to some
        behind the first that finds too few. Those whose clients may not have another seat now are
        not in the queue for it."""
        if not self.waiting:
            return []
        seats = Seats(self.config.max_num_seqs, chain(self.running, self.remote))
        admitted: list[Sequence] = []
        while (head := seats.first(self.waiting)) is not None and self._try_admit(head, seats):
            self.waiting.remove(head)
            admitted.append(head)
        return admitted if head is None else admitted + self._overtake(head, seats)

    def activate(self, sequence: Sequence, first_token: SampledToken) -> None:
        """All KV of a REMOTE sequence's prompt has arrived; it decodes from `first_token` on."""
        self.remote.discard(sequence)
        sequence.num_scheduled = sequence.num_tokens
        self.computed(sequence, sequence.num_pending)
        sequence.append(first_token)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """The sequence is computed no more but keeps its blocks until `release`."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        self.remote.discard(sequence)
        if sequence.status is not Status.DONE:
            sequence.status = Status.HELD

    def fail(self, sequence: Sequence) -> None:
        """As `hold`, for a sequence whose step came to nothing: its KV may be the reason, so
        nobody shall find it in the prefix cache."""
        self.hold(sequence)
        self.pool.forget(sequence.block_table)
        self.num_failed += 1

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: its blocks are free. Whoever calls makes sure that no step and no
        transfer touches them any more. Calling it again does nothing."""
        if sequence.status is Status.DONE:
            return
        self.hold(sequence)
        self.num_freed += len(sequence.block_table)
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.status = Status.DONE

    # ---- one step -------------------------------------------------------------------------

    def schedule(self) -> StepDelta | None:
        """The next step, or None when there is nothing to compute that is not in flight."""
        tokens, seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        drafts = self.speculator.budget(self.running, tokens) if self.speculator else 0
        decodes: list[SequenceDelta] = []
        for sequence in self._decodes():
            guess = self._guess(sequence, drafts)
            drafts -= guess.size
            decodes.append(self._steps.entry(sequence, 1, guess))
        taken = len(decodes) + sum(entry.num_drafts for entry in decodes)
        budget = min(tokens - taken, self._prompt_share())
        shares = self._chunks(budget, seqs - len(decodes))
        chunks = [self._steps.entry(sequence, count) for sequence, count in shares]
        if not decodes and not chunks:
            return None
        self.prompt_tokens += sum(len(entry.token_ids) for entry in chunks)
        drafting = self.speculator.drafting() if self.speculator else ()
        return self._steps.build(decodes, chunks, drafting)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has written the KV of the sequence's next `num_tokens` tokens."""
        first_new = sequence.num_computed // self.pool.block_size
        sequence.num_computed += num_tokens
        full = sequence.num_computed // self.pool.block_size
        if self.pool.prefix_caching and full > first_new:
            hashes = sequence.hashes(self.pool.block_size)
            for index in range(first_new, full):
                self.pool.register(sequence.block_table[index], hashes[index])

    def defer(self, sequence: Sequence, num_tokens: int) -> None:
        """A step took its next `num_tokens` tokens and could not draw one yet: the next one takes
        the last of them again."""
        self._steps.again(sequence)
        self.computed(sequence, num_tokens - 1)

    def drawn(
        self, sequence: Sequence, count: int, num_drafts: int = 0, num_accepted: int = 0
    ) -> None:
        """A step has drawn its last `count` tokens, all but one of which were drafts: the first
        ones of `num_accepted` of the step's that were right, fewer if one ended it."""
        self.generation_tokens += count
        if not num_drafts:
            return
        if self.speculator is not None:
            self.speculator.verified(sequence, num_drafts, num_accepted)
        sequence.num_scheduled += count - 1
        self.computed(sequence, count - 1)

    # ---- inside ---------------------------------------------------------------------------

    def _overtake(self, head: Sequence, seats: Seats) -> list[Sequence]:
        """Admits sequences that fit past the head of the queue, which does not. Together they
        take no more blocks than it needs itself: then the blocks that come free are kept for it.
        One that has begun is not overtaken, since somebody waits for its next token."""
        if head.num_output_tokens:
            return []
        overtaking = []
        allowance = self.pool.blocks_for(head.num_tokens) - head.num_overtaken
        behind = self.waiting.index(head) + 1
        for sequence in list(islice(self.waiting, behind, behind + QUEUE_WINDOW)):
            blocks = self.pool.blocks_for(sequence.num_tokens)
            fits = blocks + len(self.running) <= self.pool.num_free  # whatever is cached
            if blocks <= allowance and fits and self._try_admit(sequence, seats):
                self.waiting.remove(sequence)
                overtaking.append(sequence)
                allowance -= blocks
                head.num_overtaken += blocks
        return overtaking

    def _try_admit(self, sequence: Sequence, seats: Seats) -> bool:
        if not seats.has_room(sequence.client):
            return False
        # A remote prompt may be cached whole; a local one must compute at least its last
        # token, whose logits choose the next.
        usable = sequence.num_tokens - (0 if sequence.remote else 1)
        if sequence.prompt_logprobs is not None:
            usable = 0  # hidden states are in no cache: all of it is computed
        hashes = sequence.hashes(self.pool.block_size)[: usable // self.pool.block_size]
        cached, unheld = self.pool.count_cached(hashes)
        needed = self.pool.blocks_for(sequence.num_tokens) - cached
        # One spare block for each running sequence, so that an admission does not at once
        # cause a preemption.
        if needed + unheld + len(self.running) > self.pool.num_free:
            alone = not self.running and not self.remote
            if not alone or needed + unheld > self.pool.num_free:
                return False
        sequence.block_table = self.pool.match(hashes) + self.pool.allocate(needed)
        sequence.num_computed = sequence.num_scheduled = cached * self.pool.block_size
        self._count_cache(sequence)
        self._enter(sequence)
        seats.take(sequence.client)
        return True

    def _enter(self, sequence: Sequence) -> None:
        self.num_admitted += 1
        if sequence.remote:
            sequence.status = Status.REMOTE
            self.remote.add(sequence)
        else:
            sequence.status = Status.RUNNING
            self.running.append(sequence)

    def _count_cache(self, sequence: Sequence) -> None:
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.cache_queries += sequence.num_tokens
            self.cache_hits += sequence.num_cached

    def _decodes(self) -> Iterator[Sequence]:
        """A step's share of the sequences that decode, each with a block for its token. The most
        urgent ones first, and where blocks are short those of clients that have few: what a step
        has taken already cannot be preempted for them. Of equals those that no step has taken for
        longest, where not all can be taken."""
        decoding = sum(each.num_scheduled >= each.num_prompt_tokens for each in self.running)
        prompts, most = len(self._prompts()), self.config.max_num_seqs
        room = most - prompt_seats(decoding, prompts, most, self._steps.step)
        share = min(-(-decoding // self.micro_batches), room)
        late, short = decoding > room, self.pool.num_free < decoding
        seats = self._seats() if short else {}

        def turn(each: Sequence) -> tuple[int, int, int]:
            return each.priority, seats.get(each.client, 0), each.last_taken if late else 0

        for sequence in sorted(self.running, key=turn):
            running = sequence.status is Status.RUNNING  # or preempted for one before it
            if share and running and sequence.decodes and self._grow(sequence):
                share -= 1
                yield sequence

    def _guess(self, sequence: Sequence, budget: int) -> Draft:
        if self.speculator is None or budget <= 0:
            return NO_DRAFT
        return self.speculator.guess(sequence, self.pool, len(self.running), budget)

    def _prompts(self) -> list[Sequence]:
        """Prompts some of whose tokens no step has taken yet."""
        return [each for each in self.running if each.num_unscheduled and not each.decodes]

    def _chunks(self, budget: int, most: int) -> list[tuple[Sequence, int]]:
        """The prompts a step takes something of, at most so many, and how many tokens."""
        prompts = in_turn(self._prompts())[:most]
        chunks = share_budget(
            [each.num_unscheduled for each in prompts], max(budget, 0), self._steps.step
        )
        return [(each, chunk) for each, chunk in zip(prompts, chunks, strict=True) if chunk]

    def _prompt_share(self) -> int:
        """Tokens of prompts a step takes, so that every step in flight has some."""
        pending = sum(each.num_pending for each in self.running)
        return max(-(-pending // self.micro_batches), MIN_CHUNK)

    def _grow(self, sequence: Sequence) -> bool:
        """Makes sure that the pending token has a slot; preempts to find one. If false, the
        sequence was preempted itself, or waits for what is in flight."""
        if self.pool.blocks_for(sequence.num_tokens) <= len(sequence.block_table):
            return True
        seats = self._seats()
        while self.pool.num_free == 0:
            idle = (each for each in reversed(self.running) if not each.in_flight)
            # Of equals one of the client that has most, and of its the youngest.
            victim = max(idle, key=lambda each: (each.priority, seats[each.client]))
            if victim is sequence and any(each.in_flight for each in self.running):
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def _seats(self) -> Counter[str]:
        """Sequences that are computed, of each client."""
        return Counter(each.client for each in self.running)

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.remote = False  # whatever it was, this node computes it again
        sequence.status = Status.WAITING
        sequence.times.preempt(monotonic())
        ahead = sum(each.priority < sequence.priority for each in self.waiting)
        self.waiting.insert(ahead, sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        """No later step takes it, unless it is admitted again."""
        self.running.remove(sequence)
        self._steps.forget(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)


def _turn(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.priority, sequence.num_output_tokens == 0, sequence.turn
