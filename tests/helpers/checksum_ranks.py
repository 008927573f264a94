"""Ranks without a model: KV and tokens are checksums of all earlier tokens, and a cache stores them
per slot. So a sequence that reads another sequence's blocks gets a wrong checksum."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from zlib import crc32

import msgspec
import torch

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import FinishReason
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.distributed.executor import Executor
from pdserve.common.engine.kv_pool import NO_BLOCK
from pdserve.common.engine.messages import DRAWN, SequenceDelta, StepDelta, StepOutput
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.worker.input_batch import BlockIds, InputBatch, StepSequence

VOCAB, BLOCK_SIZE, EOS, STOP = 64, 4, 0, 9

Tables = Sequence[Sequence[int] | BlockIds]
FULL = KVGroup((0,), 1, 1)

State = int  # checksum of the tokens up to one: its KV
WRONG = -1  # KV of no sequence


def after(state: State, token: int) -> State:
    return crc32(b"%d %d" % (state, token))


def states(tokens: Iterable[int]) -> list[State]:
    found, state = [], 1
    for token in tokens:
        found.append(state := after(state, token))
    return found


def draw(state: State, last: int, seed: int, position: int, may_end: bool = True) -> int:
    """Returns the token after `last`; tokens mostly repeat, so that n-gram drafts succeed."""
    chance = crc32(b"%d %d %d" % (state, seed, position))
    token = chance // 8 % VOCAB if chance % 8 == 0 else last % 5 + 1
    return token if may_end or token not in (EOS, STOP) else token + 1


def generate(
    prompt: Sequence[int], params: SamplingParams, seed: int, window: int
) -> tuple[list[int], FinishReason]:
    """Returns the tokens that a sequence gets when it runs alone."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        may_end = len(output) >= params.min_tokens
        output.append(draw(states(tokens)[-1], tokens[-1], seed, len(tokens), may_end))
        tokens.append(output[-1])
        if tokens[-1] in (EOS, STOP):
            return output, FinishReason.STOP
        if len(output) >= params.max_tokens or len(tokens) >= window:
            return output, FinishReason.LENGTH


class Cache:
    """The state of each slot's token, by block. With `one`, as for a recurrent layer: only the
    state after the last token written, and only in blocks that a sequence has."""

    def __init__(self, one: bool = False) -> None:
        self.blocks: dict[int, list[State]] = {}
        self._one = one

    def write(self, table: Sequence[int] | BlockIds, position: int, state: State) -> None:
        number = int(table[position // BLOCK_SIZE])
        if self._one:
            self.blocks[number] = [WRONG] * BLOCK_SIZE
        assert self._one or number != NO_BLOCK
        self.blocks.setdefault(number, [WRONG] * BLOCK_SIZE)[position % BLOCK_SIZE] = state

    def read(self, table: Sequence[int] | BlockIds, start: int, end: int) -> list[State]:
        """Returns the states at positions start … end-1."""
        return [
            self.blocks[int(table[position // BLOCK_SIZE])][position % BLOCK_SIZE]
            for position in range(start, end)
        ]


class GroupCaches:
    """A cache per KV group, each with its own block tables."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        self.caches = [Cache(one=group.state) for group in groups]

    def write(self, tables: Tables, position: int, state: State) -> None:
        for cache, table in zip(self.caches, tables, strict=True):
            cache.write(table, position, state)

    def check(
        self, tables: Tables, known: Sequence[State], query: int | None = None, ahead: bool = False
    ) -> None:
        """Checks what the query at `query` (default: after the known tokens) reads. `ahead`: steps
        in flight may have computed more, so that a recurrent state may be newer."""
        query = len(known) if query is None else query
        for group, cache, table in zip(self._groups, self.caches, tables, strict=True):
            if group.state and ahead:
                continue
            first = 0 if group.window is None else max(0, query - group.window + 1)
            assert cache.read(table, first, len(known)) == [*known[first:]], (
                f"{group.name}: KV of another sequence"
            )


async def ticks(rng: random.Random, most: int) -> None:
    for _ in range(rng.randrange(most)):
        await asyncio.sleep(0)


class StepsAlone(Executor):
    """The parts of an executor that an engine without KV transfers does not use."""

    async def start(self) -> Sequence[bytes]:
        return []

    async def ping(self, rank: int) -> None: ...

    async def call(self, rank: int, message: bytes) -> bytes:
        return b""

    async def shutdown(self, deadline: float) -> None: ...


class ChecksumRanks(StepsAlone):
    """Computes steps in order, each at a random time between the call and its answer. Sometimes
    defers a sequence that has bad words."""

    def __init__(self, rng: random.Random, groups: Sequence[KVGroup] = (FULL,)) -> None:
        self.rng = rng
        self.cache = GroupCaches(groups)
        self._defers = not any(group.state for group in groups)
        self.sequences: dict[int, EngineSequence] = {}  # seq_id → the engine's sequence
        self.touched = Counter[int]()  # seq_ids of the steps in flight
        # Sequences whose next token fails; the KV of that step is wrong.
        self.broken: set[int] = set()
        self.num_drawn = 0  # tokens that were used before the engine knew them
        self._last: dict[int, int] = {}  # seq_id → the token of the last step
        self._unknown: set[int] = set()  # seq_ids that failed but are still in the step
        self._batch, self._draft_batch = _input_batch(), _input_batch()
        self._draft_cache = GroupCaches([FULL])
        self._computing, self._answering = asyncio.Lock(), asyncio.Lock()

    @property
    def num_known(self) -> int:
        """The number of sequences that a rank remembers."""
        return len(self._batch)

    async def step(self, message: bytes) -> bytes:
        delta = msgspec.msgpack.decode(message, type=StepDelta)
        sequences = Counter(each.seq_id for each in delta.sequences)
        self.touched += sequences
        async with self._computing:
            await ticks(self.rng, 4)
            output = self._compute(self._with_drafts(delta))
        async with self._answering:
            await ticks(self.rng, 4)
        self.touched -= sequences
        return msgspec.msgpack.encode(output)

    def _with_drafts(self, delta: StepDelta) -> StepDelta:
        """Like `Drafter.complete`; most drafts are right."""
        batch = self._draft_batch.apply(StepDelta(delta.step, delta.drafting, delta.ended))
        wanted = {each.seq_id: each.num_drafts for each in delta.drafting}
        drafts = {each.seq_id: self._guess(each, wanted[each.seq_id]) for each in batch.sequences}
        entries = (
            replace(each, drafts=each.drafts or drafts.get(each.seq_id, ()))
            for each in delta.sequences
        )
        return replace(delta, sequences=tuple(entries))

    def _guess(self, sequence: StepSequence, count: int) -> tuple[int, ...]:
        state, position = self._forward(self._draft_cache, sequence)
        guesses: list[int] = []
        last = sequence.token_ids[-1]
        for _ in range(count):
            right = draw(state, last, sequence.seed, position)
            last = right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
            guesses.append(last)
            if len(guesses) < count:  # the last draft is not computed
                state = after(state, last)
                self._draft_cache.write(sequence.block_tables, position, state)
                position += 1
        return tuple(guesses)

    def _filled(self, entry: SequenceDelta) -> SequenceDelta:
        if entry.token_ids != (DRAWN,):
            return entry
        self.num_drawn += 1
        if entry.seq_id not in self._last:
            self._unknown.add(entry.seq_id)
        return replace(entry, token_ids=(self._last.get(entry.seq_id, 0),))

    def _forward(self, cache: GroupCaches, sequence: StepSequence) -> tuple[State, int]:
        """Writes the sequence's tokens; returns (state after them, end position)."""
        start, position = sequence.start, sequence.start
        before = states(self.sequences[sequence.seq_id].token_ids[:start])
        if sequence.seq_id not in self._unknown:
            cache.check(sequence.block_tables, before)
        state = before[-1] if before else 1
        for position, token in enumerate(sequence.token_ids, start):
            state = after(state, token)
            cache.write(sequence.block_tables, position, state)
        return state, position + 1

    def _compute(self, delta: StepDelta) -> StepOutput:
        tokens, failed, deferred, prompts = [], [], [], []
        self._unknown.clear()
        delta = replace(delta, sequences=tuple(map(self._filled, delta.sequences)))
        for each in self._batch.apply(delta).sequences:
            check_known(each, self.sequences[each.seq_id])
            state, end = self._forward(self.cache, each)
            if each.scored:
                scores = array("I", each.scored).tobytes()  # a token's score is the token itself
                found = PromptLogprobs(each.start + 1, 0, scores, scores, b"", b"")
                prompts.append((each.seq_id, found))
            if each.sampling is None:
                continue
            if each.seq_id in self.broken:
                for position in range(each.start, end):
                    self.cache.write(each.block_tables, position, WRONG)
                failed.append((each.seq_id, "broken"))
            elif self._defers and each.sampling.bad_words_token_ids and self.rng.random() < 0.3:
                deferred.append(each.seq_id)
            else:
                tokens += [(each.seq_id, SampledToken(i)) for i in self._drawn(each, state, end)]
        self._last = {seq_id: token.token_id for seq_id, token in tokens}
        return StepOutput(
            delta.step,
            tuple(tokens),
            failed=tuple(failed),
            deferred=tuple(deferred),
            prompts=tuple(prompts),
        )

    def _drawn(self, sequence: StepSequence, state: State, position: int) -> Iterable[int]:
        """Yields tokens up to the first that differs from its draft; later KV is wrong."""
        last = sequence.token_ids[-1]
        banned = (sequence.banned_token_ids, *sequence.drafts_banned)
        for index, guess in enumerate((*sequence.drafts, None)):
            last = draw(state, last, sequence.seed, position, EOS not in banned[index])
            yield last
            if last != guess:
                for late in range(len(sequence.drafts) - index):
                    self.cache.write(sequence.block_tables, position + late, WRONG)
                return
            state = after(state, last)
            self.cache.write(sequence.block_tables, position, state)
            position += 1


def check_known(entry: StepSequence, sequence: EngineSequence) -> None:
    """Checks a rank's state of a sequence against the engine's while their step is in flight; the
    rank may know one token more."""
    params, end = sequence.sampling, entry.start + len(entry.token_ids)
    tokens = sequence.token_ids
    if len(tokens) == entry.start:
        tokens = [*tokens, *entry.token_ids]
    for table, own in zip(entry.block_tables, sequence.block_tables, strict=True):
        known = zip(table, own, strict=False)
        assert len(table) <= len(own) and all(b in (a, NO_BLOCK) for a, b in known)
    assert [*entry.token_ids] == tokens[entry.start : end]
    assert entry.seed == params.seed + sequence.choice
    if end < len(tokens):
        assert entry.sampling is None and entry.banned_token_ids == ()
        return
    assert entry.sampling == params
    output = tuple(tokens[sequence.num_prompt_tokens :])
    ends = () if len(output) >= params.min_tokens else (EOS, STOP)
    words = (word for word in params.bad_words_token_ids if len(word) <= len(output) + 1)
    completing = {w[-1] for w in words if output[len(output) + 1 - len(w) :] == w[:-1]}
    assert entry.banned_token_ids[: len(ends)] == ends
    assert {*entry.banned_token_ids[len(ends) :]} == completing
    assert (entry.counts is not None) == params.penalised
    if entry.counts is not None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert entry.counts.prompt.nonzero().flatten().tolist() == sorted(set(prompt))
        assert entry.counts.output.tolist() == [output.count(token) for token in range(VOCAB)]


def _input_batch() -> InputBatch:
    return InputBatch(BLOCK_SIZE, VOCAB, torch.device("cpu"), samples=True)
