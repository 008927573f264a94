"""Decides which sequences the next step computes. Policy only: no tensors, no I/O.

A step has a budget of tokens. Decoding sequences get one token each first, so long prompts do not
stall them; if more run than a step can compute, those that have waited longest. The rest of the
budget goes to prompts, in chunks (chunked prefill, Sarathi-Serve, OSDI'24), shared so that neither
a long prompt nor many short ones delay the others (`share_budget`). A sequence is admitted only
when blocks for all its present tokens are free; while it waits, shorter ones may overtake it to a
limit. If a decoding sequence needs a block and none is free, it preempts the least urgent sequence
(of equals the youngest of the client with most blocks), whose blocks are freed and whose tokens are
recomputed later. Clients share the blocks (`BlockShares`).

A pipeline has one step per stage in flight (micro-batches, as in GPipe, arXiv:1811.06965). Each
step takes only its share of the work, or the other stages would have none. A prompt's next chunk
may follow at once, because every stage computes steps in order; a decoding sequence waits for its
sampled token.

With asynchronous scheduling (--async-scheduling) a second step follows the one in flight at once:
its sequences continue with the tokens that the first one samples (`DRAWN`). It has all sequences
that would be in it if it came later. If one of them cannot do without the token on the host, or
blocks are short, the step comes later.

    WAITING ──admit──▶ RUNNING ──hold──▶ HELD ──release──▶ DONE
      │  ▲                │  ▲
      │  └────preempt─────┘  └────────activate────────┐
      └──admit, its KV comes from another node──▶ REMOTE ──hold──▶ HELD
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from time import monotonic

from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.sampling import SampledToken
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.block_shares import RESERVED, BlockShares
from pdserve.common.engine.fair_queue import ClientSlots, next_round, prompt_slots, share_budget
from pdserve.common.engine.kv_pool import Fit, KVPool
from pdserve.common.engine.messages import SequenceDelta, StepDelta
from pdserve.common.engine.sequence import Sequence, Status, reaches_limit
from pdserve.common.engine.speculation import NO_DRAFT, Draft, Speculator
from pdserve.common.engine.step_builder import StepBuilder

QUEUE_WINDOW = 64
"""Sequences after the head of the queue that may be admitted when the head does not fit."""
MIN_CHUNK = 64
"""Least tokens of a chunk in a pipeline: smaller ones take as long, to read the weights."""


class Scheduler:
    """Owns the status, block tables and progress of every sequence added to it."""

    def __init__(
        self,
        pool: KVPool,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        micro_batches: int = 1,
        speculator: Speculator | None = None,
        now: Callable[[], float] = monotonic,
        max_model_len: int = sys.maxsize,
    ) -> None:
        """`micro_batches`: a pipeline's steps in flight. `speculator`: drafts tokens."""
        self.pool = pool
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.micro_batches = micro_batches
        self.steps_in_flight = micro_batches + config.async_scheduling  # at once
        self.speculator = speculator
        self._max_model_len = max_model_len
        self._now = now
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.remote: set[Sequence] = set()
        self._shares = BlockShares(pool.num_blocks, now)
        # Totals since start, for the watchdog and the metrics.
        self.num_admitted = 0
        self.num_freed = 0  # blocks of released sequences
        self.num_preemptions = 0
        self.num_failed = 0  # sequences without a result in a step
        self.prompt_tokens = 0  # computed here, recomputed ones included
        self.generation_tokens = 0  # generated here
        self.step_sizes = Counter[int]()  # steps by their number of tokens
        self.cache_queries = 0  # prompt tokens looked up in the prefix cache
        self.cache_hits = 0  # prompt tokens found there
        windows = [group.window for group in pool.groups if group.window]
        self._steps = StepBuilder(eos_token_ids, windows)

    @property
    def computed_steps(self) -> StepShape:
        """The sum of all steps since start."""
        return self._steps.computed

    # ---- entering and leaving -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence: by priority; then those that another node has started before new ones;
        then clients take turns; within a client first come, first served. Those of clients above
        their share of the blocks come after others of their priority (`admit`)."""
        sequence.status = Status.WAITING
        self._shares.see(sequence.client)
        sequence.round = next_round(sequence.client, self.waiting, self._prompts())
        ahead = sum(self._turn(each) < self._turn(sequence) for each in self.waiting)
        self.waiting.insert(ahead, sequence)

    def admit(self) -> list[Sequence]:
        """Admits sequences from the head of the queue while blocks last, then some behind the first
        one that does not fit. Skips sequences whose client has no free slot."""
        if not self.waiting:
            return []
        if self._share_blocks():
            self.waiting = deque(sorted(self.waiting, key=self._turn))
        slots = ClientSlots(self.config.seqs, chain(self.running, self.remote))
        admitted: list[Sequence] = []
        while (head := slots.first(self.waiting)) is not None and self._try_admit(head, slots):
            self.waiting.remove(head)
            admitted.append(head)
        return admitted if head is None else admitted + self._overtake(head, slots)

    def activate(self, sequence: Sequence, first_token: SampledToken) -> None:
        """Starts decoding a REMOTE sequence, whose KV has arrived, after `first_token`."""
        self.remote.discard(sequence)
        sequence.num_scheduled = sequence.num_tokens
        self.computed(sequence, sequence.num_pending)
        sequence.append(first_token)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stops scheduling the sequence; it keeps its blocks until `release`."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        self.remote.discard(sequence)
        if sequence.status is not Status.DONE:
            sequence.status = Status.HELD

    def fail(self, sequence: Sequence) -> None:
        """Like `hold`, for a sequence whose step failed. Its KV may be the cause, so its blocks
        leave the prefix cache."""
        self.hold(sequence)
        self.pool.forget(sequence)
        self.num_failed += 1

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that has ended. The caller ensures that no step and no
        transfer uses them any more. Calling it again does nothing."""
        if sequence.status is Status.DONE:
            return
        self.hold(sequence)
        self._shares.see(sequence.client)
        self.num_freed += self.pool.release(sequence)
        sequence.status = Status.DONE

    # ---- one step -------------------------------------------------------------------------

    def schedule(self) -> StepDelta | None:
        """Returns the next step, or None if there is nothing to compute that is not in flight."""
        if self.config.async_scheduling and not self._may_run_ahead():
            return None
        self._share_blocks()
        tokens, seqs = self.config.tokens, self.config.seqs
        drafts = self.speculator.budget(self.running, tokens) if self.speculator else 0
        decodes: list[SequenceDelta] = []
        for sequence in self._decodes():
            draft = self._draft(sequence, drafts)
            drafts -= draft.size
            decodes.append(self._steps.entry(sequence, 1, draft))
        taken = len(decodes) + sum(entry.num_drafts for entry in decodes)
        budget = min(tokens - taken, self._prompt_share())
        shares = self._chunks(budget, seqs - len(decodes))
        chunks = [self._steps.entry(sequence, count) for sequence, count in shares]
        if not decodes and not chunks:
            return None
        chunked = sum(len(entry.token_ids) for entry in chunks)
        self.prompt_tokens += chunked
        self.step_sizes[taken + chunked] += 1
        drafting = self.speculator.drafting() if self.speculator else ()
        return self._steps.build(decodes, chunks, drafting)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that a step has written the KV of the sequence's next `num_tokens` tokens."""
        self.pool.computed(sequence, num_tokens)

    def defer(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that a step computed the next `num_tokens` tokens but sampled none yet: the next
        step computes the last of them again."""
        self._steps.again(sequence)
        self.computed(sequence, num_tokens - 1)

    def drawn(
        self, sequence: Sequence, count: int, num_drafts: int = 0, num_accepted: int = 0
    ) -> None:
        """Records that a step has appended `count` tokens: accepted drafts and one more. `count` is
        at most `num_accepted` + 1, and less if a token ended the sequence."""
        self.generation_tokens += count
        if not num_drafts:
            return
        if self.speculator is not None:
            self.speculator.verified(sequence, num_drafts, num_accepted)
        sequence.num_scheduled += count - 1
        self.computed(sequence, count - 1)

    # ---- inside ---------------------------------------------------------------------------

    def _overtake(self, head: Sequence, slots: ClientSlots) -> list[Sequence]:
        """Admits sequences behind a head of the queue that does not fit, up to as many blocks as
        the head needs; from then on freed blocks are kept for it. A head that has already produced
        tokens is not overtaken, because its client waits for the next one, and no head is by a
        client with more blocks than its share and than the head's client."""
        if head.num_output_tokens:
            return []
        overtaking = []
        allowance = self.pool.most_blocks(head.num_tokens) - head.num_overtaken
        behind = self.waiting.index(head) + 1
        for sequence in list(islice(self.waiting, behind, behind + QUEUE_WINDOW)):
            blocks = self.pool.most_blocks(sequence.num_tokens)
            if blocks > allowance or self._shares.yields(sequence.client, head.client):
                continue
            uncached = self.pool.fit((), sequence.num_tokens, sequence.remote)
            if self._has_room(sequence, uncached) and self._try_admit(sequence, slots):
                self.waiting.remove(sequence)
                overtaking.append(sequence)
                allowance -= blocks
                head.num_overtaken += blocks
        return overtaking

    def _try_admit(self, sequence: Sequence, slots: ClientSlots) -> bool:
        if not slots.has_room(sequence.client):
            return False
        # A remote prompt may be cached completely; a local one must compute at least its last
        # token, whose logits give the next.
        usable = sequence.num_tokens - (0 if sequence.remote else 1)
        if sequence.prompt_logprobs is not None:
            usable = 0  # scores need hidden states, which are not cached
        hashes = sequence.hashes(self.pool.block_size)[: usable // self.pool.block_size]
        fit = self.pool.fit(hashes, sequence.num_tokens, sequence.remote)
        if not self._has_room(sequence, fit):
            alone = not self.running and not self.remote
            if not alone or not self.pool.has_room(fit, 0):
                return False
        self.pool.admit(sequence, fit)
        self._count_cache(sequence)
        self._enter(sequence)
        slots.take(sequence.client)
        return True

    def _has_room(self, sequence: Sequence, fit: Fit) -> bool:
        """Returns whether it may have the blocks. One spare block is kept per running sequence, or
        the admission could cause a preemption: unless that is one of a client that yields."""
        client, spare = sequence.client, len(self.running)
        if self._shares.contended:
            spare -= sum(self._shares.yields(each.client, client) for each in self.running)
        return self.pool.has_room(fit, spare, self.running, self._shares.reserved(client))

    def _share_blocks(self) -> bool:
        """Counts the clients' blocks, if several share them; returns whether they do."""
        if self._shares.contended:
            held = ((each.client, self.pool.held(each)) for each in self.pool.holders)
            self._shares.update(chain(held, ((each.client, 0) for each in self.waiting)))
        return self._shares.contended

    def _turn(self, each: Sequence) -> tuple[int, float, bool, int, int]:
        rank = self._shares.rank(each.client)
        return each.priority, rank, each.num_output_tokens == 0, each.round, each.seq_id

    def _enter(self, sequence: Sequence) -> None:
        self.num_admitted += 1
        self._shares.add(sequence.client, self.pool.held(sequence), 1)
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
        """Yields the decoding sequences of the next step, each with a block for its token. Order:
        priority; if blocks are short, clients with fewer blocks, because a sequence already in
        the step cannot be preempted; if not all fit, those not scheduled for longest."""
        decoding = sum(each.num_scheduled >= each.num_prompt_tokens for each in self.running)
        prompts, most = len(self._prompts()), self.config.seqs
        room = most - prompt_slots(decoding, prompts, most, self._steps.step)
        share = min(-(-decoding // self.micro_batches), room)
        late, short = decoding > room, self._num_unreserved() < decoding

        def order(each: Sequence) -> tuple[int, float, int]:
            use = self._shares.use(each.client) if short else 0.0
            return each.priority, use, each.last_taken if late else 0

        for sequence in sorted(self.running, key=order):
            running = sequence.status is Status.RUNNING  # it may have just been preempted
            next_token = sequence.decodes or self._continues(sequence)
            if share and running and next_token and self._grow(sequence):
                share -= 1
                yield sequence

    def _continues(self, sequence: Sequence) -> bool:
        """Returns whether the sequence continues with a token that is not known yet, unless that
        token ends it."""
        if not (self.config.async_scheduling and sequence.awaits) or sequence.hands_over:
            return False
        return not reaches_limit(sequence, 1, self._max_model_len)

    def _may_run_ahead(self) -> bool:
        """Returns whether the next step needs nothing of the step in flight, if there is one."""
        if not any(each.in_flight for each in self.running):
            return True
        decoding = [each for each in self.running if each.decodes or self._continues(each)]
        if any(each.awaits and each.sampling.needs_host for each in decoding):
            return False
        growing = sum(each.num_scheduled % self.pool.block_size == 0 for each in decoding)
        return growing <= self._num_unreserved()

    def _num_unreserved(self) -> int:
        """Returns the free blocks that a sequence of any client may take."""
        return min(self.pool.free(RESERVED if self._shares.contended else None))

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        if self.speculator is None or budget <= 0:
            return NO_DRAFT
        free = min(self.pool.free(self._shares.reserved(sequence.client, own=1)))
        return self.speculator.propose(sequence, self.pool, len(self.running), budget, free)

    def _prompts(self) -> list[Sequence]:
        """Returns the running sequences with prompt tokens that are not scheduled yet."""
        return [each for each in self.running if each.num_unscheduled > 0 and not each.decodes]

    def _chunks(self, budget: int, most: int) -> list[tuple[Sequence, int]]:
        """Returns up to `most` prompts of the next step and the tokens of each."""
        prompts = sorted(self._prompts(), key=lambda each: each.round)[:most]
        chunks = share_budget(
            [each.num_unscheduled for each in prompts], max(budget, 0), self._steps.step
        )
        fitting = [
            (each, self.pool.extend(each, each.num_scheduled + chunk) - each.num_scheduled)
            for each, chunk in zip(prompts, chunks, strict=True)
            if chunk
        ]
        return [(each, chunk) for each, chunk in fitting if chunk]

    def _prompt_share(self) -> int:
        """Returns the prompt tokens per step that leave some for the other steps in flight."""
        pending = sum(each.num_pending for each in self.running)
        return max(-(-pending // self.micro_batches), MIN_CHUNK)

    def _grow(self, sequence: Sequence) -> bool:
        """Makes sure that its next token has a slot, by preemption if necessary. Returns False if
        the sequence itself was preempted, or must wait for steps in flight."""
        needed = sequence.num_scheduled + 1
        while not self.pool.grow(
            sequence, needed, reserved := self._shares.reserved(sequence.client, own=1)
        ):
            victim = self._victim(reserved is not None)
            if victim is sequence and any(each.in_flight for each in self.running):
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self, above: bool) -> Sequence:
        """Returns the least urgent sequence that is in no step: among equal priorities, the
        youngest of the client with most blocks. `above`: only of clients above their share."""
        idle = (each for each in reversed(self.running) if not each.in_flight)
        if above:
            idle = (each for each in idle if self._shares.is_above(each.client))
        return max(idle, key=lambda each: (each.priority, self._shares.use(each.client)))

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._shares.add(sequence.client, -self.pool.held(sequence), -1)
        self.pool.release(sequence)
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.remote = False  # this node recomputes it
        sequence.status = Status.WAITING
        sequence.times.preempt(self._now())
        ahead = sum(each.priority < sequence.priority for each in self.waiting)
        self.waiting.insert(ahead, sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        """Removes the sequence from the running ones and from what the ranks know."""
        self.running.remove(sequence)
        self._steps.forget(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
