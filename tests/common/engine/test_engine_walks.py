"""Random lives of sequences in a whole engine: computed here or elsewhere, preempted, guessed,
deferred, broken, given up and held. Each gets the tokens it would get alone, from ranks that know
of it what the engine knows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from checksum_ranks import BLOCK_SIZE, EOS, STOP, VOCAB, ChecksumRanks, generate, states, ticks
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.speculation import Speculation
from pdserve.common.core.kv_groups import LayerKV, grouped
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.draft_model import DraftModel
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.messages import ExpertLoad
from pdserve.common.engine.ngram import PromptLookup
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish, Sequence, Status
from pdserve.common.engine.speculation import Speculator

WINDOW, NUM_BLOCKS, MAX_NUM_SEQS = 40, 13, 5
MAX_TOKENS = 24  # of a step
CLIENTS = 40
PATIENCE = 15  # seconds: on quiet cores a walk takes a fraction of one


def speculator(guessing: str, drafts: BlockPool) -> Speculator | None:
    if guessing == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        return PromptLookup(Speculation.read(config), WINDOW)
    if guessing == "draft":
        config = {"model": "x", "num_speculative_tokens": 3}
        return DraftModel(Speculation.read(config), WINDOW - 6, drafts, chunk=8)
    return None


class Walk:
    """An engine, its listener and its clients."""

    def __init__(
        self, seed: str, stages: int, guessing: str, kept: tuple[int | str | None, ...] = (None,)
    ) -> None:
        """`kept`: a window, all (None) or a state of each layer."""
        self.rng = random.Random(seed)
        groups = grouped(
            [
                LayerKV.of_state(1, 1) if isinstance(each, str) else LayerKV(1, 1, each)
                for each in kept
            ]
        )
        self.ranks = ChecksumRanks(self.rng, groups)
        num_blocks = [NUM_BLOCKS - (3 if group.window else 0) for group in groups]
        self.pool = KVPool(groups, num_blocks, BLOCK_SIZE, in_flight=max(stages, 2) * MAX_TOKENS)
        self.drafts = BlockPool(NUM_BLOCKS - 3, BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            async_scheduling=guessing == "async",
        )
        guesses = speculator(guessing, self.drafts)
        self.scheduler = Scheduler(self.pool, config, (EOS,), stages, guesses, max_model_len=WINDOW)
        self.engine = EngineCore(self.ranks, self.scheduler, self, WINDOW)
        self.seen: Counter[str] = Counter()
        self.told: dict[int, list[int]] = {}
        self._ended: dict[int, asyncio.Future[str]] = {}
        self._admitted: dict[int, asyncio.Event] = {}
        self._held: set[int] = set()  # seq_ids whose first token is all that is wanted
        self._generated = 0.0
        self._prefixes = [[self.rng.randrange(1, VOCAB) for _ in range(24)] for _ in range(3)]

    # ---- what the engine says ----

    def admitted(self, sequence: Sequence) -> None:
        self._admitted[sequence.seq_id].set()
        self._check_kv(sequence)

    def computed(self, sequence: Sequence) -> None:
        assert not sequence.cancelled, "a stopped sequence reports nothing"
        self._check_kv(sequence)

    def sampled(
        self, sequence: Sequence, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self.told[sequence.seq_id] += [each.token_id for each in tokens]
        if sequence.seq_id in self._held:
            self.scheduler.hold(sequence)
        elif finish:
            self.engine.release(sequence)
        else:
            return
        self._ended[sequence.seq_id].set_result(finish.reason if finish else "held")

    def failed(self, sequence: Sequence, reason: str, code: str) -> None:
        assert code == "SEQUENCE_FAILED", reason
        self._ended[sequence.seq_id].set_result("failed")

    def routed(self, load: ExpertLoad) -> None: ...

    def _check_kv(self, sequence: Sequence) -> None:
        count = sequence.num_computed
        # The node of a prompt sends what the query after all its tokens reads.
        query = sequence.num_tokens if sequence.status is Status.REMOTE else None
        known = states(sequence.token_ids[:count])
        self.ranks.cache.check(sequence.block_tables, known, query, sequence.in_flight)
        assert self.scheduler.generation_tokens >= self._generated, "a counter that goes back"
        self._generated = self.scheduler.generation_tokens

    # ---- clients ----

    async def client(self) -> None:
        rng = self.rng
        await ticks(rng, 60)
        job, seed = self._job()
        remote = rng.random() < 0.4
        sequence = self.engine.new_sequence(job, job.choices[0], remote=remote)
        seq_id, begun = sequence.seq_id, len(job.choices[0].output_token_ids)
        expected, reason = generate(job.prompt_token_ids, job.sampling, seed, WINDOW)
        expected = expected[begun:]
        self.ranks.sequences[seq_id] = sequence
        self.told[seq_id] = told = []
        self._ended[seq_id] = ended = asyncio.get_running_loop().create_future()
        self._admitted[seq_id] = asyncio.Event()
        if not remote and rng.random() < 0.3:
            self._held.add(seq_id)
            sequence.hands_over = True
        self.engine.add(sequence)
        if remote:
            await self._admitted[seq_id].wait()
            await ticks(rng, 20)
            first = expected.pop(0)
            if rng.random() < 0.2 or await self._land(sequence, first):
                self.seen["given up"] += bool(expected)
                self.engine.release(sequence)
                return
        if rng.random() < 0.75:
            await ended
        else:
            await ticks(rng, 100)
            if rng.random() < 0.5 and sequence.status is Status.RUNNING:
                self.ranks.broken.add(seq_id)
                await ended
            else:
                while not ended.done() and seq_id not in self.ranks.touched:
                    await asyncio.sleep(0)
        how = ended.result() if ended.done() else "stopped"
        self.seen[how] += 1
        assert told == expected[: len(told)]
        assert how not in ("stop", "length") or (told, reason) == (expected, how)
        if sequence.prompt_logprobs is not None and told:
            found = sequence.take_prompt_logprobs()
            assert found is not None
            assert memoryview(found.logprobs).cast("I").tolist() == [*job.prompt_token_ids[1:]]
        await self._leave(sequence, how)

    async def _leave(self, sequence: Sequence, how: str) -> None:
        """The blocks that a step touches are not freed before its end, a stopped sequence is not
        reported, and what is held stays as it is."""
        heard = len(self.told[sequence.seq_id])
        if sequence.seq_id in self.ranks.touched:
            self.seen["in flight"] += 1
        if sequence.status is Status.RUNNING and sequence.seq_id in self.ranks.touched:
            with pytest.raises(RuntimeError, match="stopped before"):
                self.engine.release(sequence)
        await self.engine.stop(sequence)
        assert sequence.seq_id not in self.ranks.touched
        if how == "held":
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
                self._check_kv(sequence)
        assert len(self.told[sequence.seq_id]) == heard
        self.engine.release(sequence)

    def _job(self) -> tuple[GenerateJob, int]:
        """And the seed of its choice."""
        rng = self.rng
        length = rng.choice([1, 3, 4, 5, 8, 12, 16, rng.randrange(1, 30)])
        shared = rng.choice(self._prefixes)[: rng.randrange(25)]
        prompt = tuple([*shared, *range(10, 40)][:length])
        index, most = rng.randrange(2), rng.choice([1, 2, 5, 20, 99])
        params = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, 1, most // 2]),
            seed=rng.randrange(3),
            stop_token_ids=(STOP,),
            bad_words_token_ids=self._words() if rng.random() < 0.3 else (),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            prompt_logprobs=0 if rng.random() < 0.2 else None,
        )
        seed = params.seed + index
        output, _ = generate(prompt, params, seed, WINDOW)
        begun = output[: rng.randrange(len(output))] if rng.random() < 0.3 else []
        job = GenerateJob("r", prompt, params, (Choice(index, tuple(begun)),))
        return job, seed

    def _words(self) -> tuple[tuple[int, ...], ...]:
        """Some of what is drawn all the time; ranks draw it nevertheless."""
        return tuple(tuple(self.rng.choices(range(1, 6), k=n)) for n in (1, 2, 2, 3, 9))

    async def _land(self, sequence: Sequence, token: int) -> Finish | None:
        """Its KV comes from elsewhere."""
        true, end = states(sequence.token_ids), sequence.num_tokens
        for cache, group, table in zip(
            self.ranks.cache.caches, self.pool.groups, sequence.block_tables, strict=True
        ):
            needed = group.first_kept(end, BLOCK_SIZE) * BLOCK_SIZE
            for position in range(max(sequence.num_computed, needed), end):
                cache.write(table, position, true[position])
                await ticks(self.rng, 2)
        return self.engine.activate(sequence, SampledToken(token))


@pytest.mark.parametrize(
    ("stages", "guessing"),
    [(1, ""), (3, ""), (1, "ngram"), (2, "ngram"), (1, "draft"), (1, "async")],
)
@pytest.mark.parametrize(
    ("kept", "seed"),
    [((None,), 0), ((None,), 1), ((None, 6), 0), ((None, 1, 17), 1), ((9,), 0), ((3, 14), 1)],
    ids=str,
)
async def test_whatever_happens_a_sequence_gets_the_tokens_it_would_get_alone(
    stages: int, guessing: str, kept: tuple[int | None, ...], seed: int
) -> None:
    await _walk(stages, guessing, kept, seed)


@pytest.mark.parametrize(("stages", "guessing"), [(1, ""), (3, ""), (1, "async")])
@pytest.mark.parametrize(
    ("kept", "seed"), [((None, "state"), 0), ((None, "state"), 1), ((None, 7, "state"), 0)], ids=str
)
async def test_a_sequence_with_a_state_gets_the_tokens_it_would_get_alone(
    stages: int, guessing: str, kept: tuple[int | str | None, ...], seed: int
) -> None:
    """Without drafts, which are refused with it."""
    await _walk(stages, guessing, kept, seed)


async def _walk(stages: int, guessing: str, kept: tuple[int | str | None, ...], seed: int) -> None:
    walk = Walk(f"{stages} {guessing} {seed}", stages, guessing, kept)
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        engine = group.create_task(walk.engine.run())
        clients = [group.create_task(walk.client()) for _ in range(CLIENTS)]
        await asyncio.wait(clients)
        engine.cancel()
    assert all(each.num_free == each.num_blocks for each in walk.pool.pools)
    assert walk.ranks.num_known < 2 * MAX_NUM_SEQS, "they forget what has ended"
    assert walk.scheduler.generation_tokens == sum(map(len, walk.told.values()))
    assert walk.scheduler.num_preemptions or None not in kept, "windows alone hold little"
    assert walk.scheduler.cache_hits
    assert walk.seen.keys() >= {"length", "stopped", "held", "given up", "in flight"}
    if (speculator := walk.scheduler.speculator) is not None:
        assert 0 < speculator.num_accepted_tokens < speculator.num_draft_tokens
    assert walk.drafts.num_free == walk.drafts.num_blocks
    assert (walk.ranks.num_drawn > 20) == (guessing == "async")
