"""Runs one step on one rank: flattens the batch, runs the model, samples the rows that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.parameters import MAX_LOGPROBS
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.distributed.parallel_state import ParallelState
from pdserve.common.engine.messages import DRAWN, ExpertLoad, StepOutput
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.layers import LoRA
from pdserve.common.model.staging import begin_fetch, upload, upload_together
from pdserve.common.worker.adapters import RankAdapters
from pdserve.common.worker.graphs import DecodeGraphs
from pdserve.common.worker.input_batch import StepBatch, StepSequence, TokenCounts
from pdserve.common.worker.masks import MaskScheduler
from pdserve.common.worker.prompt_scores import Scores, score_prompts
from pdserve.common.worker.sampler import FailedRow, sample
from pdserve.common.worker.token_feed import TokenFeed

# Sampling that holds the most memory at once: a dummy step must not need less than a real one.
COSTLY = SamplingParams(top_p=0.9, top_k=1000, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)


class ModelRunner:
    """Computes steps of `model` over `caches`, one per KV group
    (`[layers, planes, num_blocks, kv_heads, block_size, head_dim]`). Keeps no sequence state."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[Tensor],
        device: torch.device,
        samples: bool,
        link: StageLink | None = None,
        adapters: RankAdapters | None = None,
        block_size: int | None = None,
        feed: TokenFeed | None = None,
    ) -> None:
        """`samples`: true on the one rank whose tokens are used. `link`: to the other pipeline
        stages, if any. `adapters`: the LoRA adapters that sequences may name. `block_size`: if the
        first cache does not tell it, because it is of states. `feed`: for steps that need tokens of
        the step before."""
        self.model = model
        self.caches = caches
        self.block_size = block_size or caches[0].shape[4]
        self.device = device
        self.samples = samples
        self.graphs: DecodeGraphs | None = None  # set after they are captured
        self._link = link
        self._adapters = adapters
        self._feed = feed
        # A state does not go back to the token before: no row may be computed again.
        has_state = any(group.state for group in model.spec.kv_groups)
        self._masks = MaskScheduler(defers=not has_state)

    def run(self, batch: StepBatch) -> StepOutput:
        """Like `begin`, and waits for the result."""
        return self.begin(batch)()

    @torch.inference_mode()
    def begin(self, batch: StepBatch) -> Callable[[], StepOutput]:
        """Writes the batch's KV into the cache and samples its tokens; a GPU has only queued this
        when it returns. Returns a callable that waits for the result.

        All ranks must run the same batches in the same order, because each contains collectives.
        """
        inputs = flatten(batch.sequences, self.block_size, self.model.spec.kv_groups)
        lora = None if self._adapters is None else self._adapters.of_step(batch.sequences)
        computed, prompts = self._compute(inputs, lora)
        if not self.model.stage.last:
            self._others().send(computed)
            return lambda: StepOutput(batch.step, ())
        if not self.samples or not inputs.sampled:
            if self._feed is not None:
                self._feed.keep(row.seq_id for row in inputs.sampled)
            load = self._expert_load()
            return lambda: StepOutput(batch.step, (), load(), prompts=prompts)
        alone = len(inputs.sampled) == len(batch.sequences)
        drawn = self._draw(computed, inputs.sampled, alone)
        load = self._expert_load()
        return lambda: _output(batch.step, drawn, load(), prompts)

    def _compute(self, inputs: FlatBatch, lora: LoRA | None) -> tuple[torch.Tensor, Scores]:
        """Returns (logits of the rows to sample, scores of prompt tokens). In place of the logits
        hidden states if no row samples or another stage follows."""
        model, batches, hidden, feed = self.model, inputs.attention, None, None
        if inputs.drawn:
            feed = partial(self._fed_by().fill, drawn=inputs.drawn)
        if not model.stage.first:
            hidden = self._others().receive(len(inputs.token_ids))
        graphs = self.graphs if lora is None else None  # captured without adapters
        if graphs is not None and graphs.take(batches[0], len(inputs.sampled)):
            return graphs.run(inputs.token_ids, inputs.positions, batches, hidden, feed), ()
        lists = inputs.token_ids, inputs.positions, inputs.last_rows
        tensors = [torch.tensor(each, dtype=torch.int64) for each in lists]
        token_ids, positions, last_rows = upload_together(tensors, self.device)
        if feed is not None:
            feed(token_ids)
        contexts = model.prepare(batches)
        first = token_ids if hidden is None else hidden
        hidden = model.forward(first, positions, contexts, self.caches, lora)
        if not model.stage.last:
            return hidden, ()
        vocab = model.spec.vocab_size
        prompts = score_prompts(hidden, inputs.scored, model.compute_logits, vocab, self.samples)
        return model.compute_logits(hidden[last_rows]) if inputs.sampled else hidden, prompts

    def _draw(self, logits: Tensor, rows: list[StepSequence], alone: bool) -> _Drawn:
        """Samples. `alone`: the step has no other sequences."""
        if all(row.grammar is None for row in rows):
            sampled = sample(logits, rows)
            self._keep(rows, sampled.tokens)
            return _Drawn(rows, sampled.results)
        # A GPU computes the logits meanwhile.
        masked, deferred = self._masks.take(rows, alone)
        ready = {place: row for place, row in masked.items() if not isinstance(row, FailedRow)}
        failed = {place: row for place, row in masked.items() if isinstance(row, FailedRow)}
        where = upload(torch.tensor(list(ready), dtype=torch.int64), self.device)
        tokens = logits.new_zeros(len(rows), dtype=torch.int64)
        results: Callable[[], list[SampledToken | FailedRow]] = list
        if ready:
            sampled = sample(logits.index_select(0, where), list(ready.values()))
            tokens.index_copy_(0, where, sampled.tokens)
            results = sampled.results
        self._keep(rows, tokens)

        def together() -> list[SampledToken | FailedRow]:
            found = dict(zip(ready, results(), strict=True)) | failed
            return [found[place] for place in masked]

        return _Drawn([rows[place] for place in masked], together, deferred)

    def _keep(self, rows: Sequence[StepSequence], tokens: Tensor) -> None:
        if self._feed is not None:
            self._feed.keep((row.seq_id for row in rows), tokens)

    def _expert_load(self) -> Callable[[], ExpertLoad | None]:
        """Returns the last step's expert load on the sampling rank, None on others, later."""
        loads = self.model.expert_loads() if self.samples else None
        if loads is None:
            return lambda: None
        return summarize_loads(loads, self.model.expert_parallel_size)

    def _fed_by(self) -> TokenFeed:
        assert self._feed is not None, "`InputBatch` has found the tokens in the feed"
        return self._feed

    def _others(self) -> StageLink:
        assert self._link is not None, "a pipeline stage has a link to the others"
        return self._link

    def warm_up(self, num_tokens: int, num_seqs: int) -> None:
        """Runs a dummy step, so that kernels are selected and memory is allocated before the first
        request. Overwrites the first blocks of the caches, so no sequence may hold any."""
        groups = self.model.spec.kv_groups
        batch = dummy_batch(num_tokens, num_seqs, self.block_size, groups)
        if self.samples and self.model.stage.last:
            batch = _costly(batch, self.model.spec.vocab_size, self.device)
        self.run(batch)

    def close(self) -> None:
        """Drops the graphs, and waits until the device has done all steps."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StageLink:
    """Sends hidden states between pipeline stages.

    Rank r of a stage sends to rank r of the next. Hidden states are equal on all ranks of a stage:
    each sends its share of the columns, and the receivers all-gather them, because links within a
    stage are faster than between stages (as in Megatron-LM, arXiv:2104.04473, section 4.1)."""

    def __init__(self, state: ParallelState, hidden_size: int, dtype: torch.dtype) -> None:
        self._pp = state.pp
        self._tp = state.tp
        self._dtype = dtype
        splits = hidden_size % state.tp.size == 0
        self._width = hidden_size // state.tp.size if splits else hidden_size
        self._splits = splits and state.tp.size > 1

    def receive(self, num_tokens: int) -> Tensor:
        """Waits for `[num_tokens, hidden]` from the stage before."""
        part = self._pp.recv((num_tokens, self._width), self._dtype, self._pp.rank - 1)
        return self._tp.all_gather(part, dim=-1) if self._splits else part

    def send(self, hidden: Tensor) -> None:
        """Sends to the stage after; returns when that stage has begun to receive, so that no stage
        runs ahead by more than one micro-batch."""
        if self._splits:
            start = self._tp.rank * self._width
            hidden = hidden[:, start : start + self._width]
        self._pp.send(hidden, self._pp.rank + 1)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A step's sequences end to end."""

    token_ids: list[int]
    positions: list[int]
    attention: tuple[AttentionBatch, ...]  # one per KV group
    sampled: list[StepSequence]  # `StepSequence.rows` of the sequences that sample
    last_rows: list[int]  # row of the last token of each of `sampled`
    scored: list[tuple[int, StepSequence]]  # (first row, sequence) of prompts to score
    drawn: list[tuple[int, int]]  # (row, seq_id) of tokens that are DRAWN


def flatten(
    sequences: tuple[StepSequence, ...], block_size: int, groups: Sequence[KVGroup]
) -> FlatBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[StepSequence] = []
    last_rows: list[int] = []
    scored: list[tuple[int, StepSequence]] = []
    drawn: list[tuple[int, int]] = []
    for sequence in sequences:
        if sequence.token_ids[0] == DRAWN:
            drawn.append((len(token_ids), sequence.seq_id))
        if sequence.scored:
            scored.append((len(token_ids), sequence))
        token_ids += sequence.token_ids
        token_ids += sequence.drafts
        positions += range(sequence.start, sequence.start + sequence.num_tokens)
        if sequence.sampling is not None:
            sampled += sequence.rows
            last_rows += range(len(token_ids) - 1 - len(sequence.drafts), len(token_ids))
    attention = tuple(
        _attention(sequences, block_size, index, group) for index, group in enumerate(groups)
    )
    return FlatBatch(token_ids, positions, attention, sampled, last_rows, scored, drawn)


def _attention(
    sequences: tuple[StepSequence, ...], block_size: int, index: int, group: KVGroup
) -> AttentionBatch:
    """Returns the attention of one KV group. It begins at the first block that a sequence's queries
    read: what is before may be another sequence's by now, and takes neither time nor memory."""
    starts = [sequence.start for sequence in sequences]
    tables = [sequence.block_tables[index] for sequence in sequences]
    query_lens = [sequence.num_tokens for sequence in sequences]
    skipped = None
    if group.window is not None:
        firsts = [group.first_block(start, block_size) for start in starts]
        together = zip(starts, tables, firsts, strict=True)
        trimmed = [(start - block_size * n, table[n:]) for start, table, n in together]
        starts, tables = [start for start, _ in trimmed], [table for _, table in trimmed]
        skipped = [block_size * n for n in firsts]
    return AttentionBatch(query_lens, starts, tables, block_size, skipped)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rows with a result, their results, which wait for the device, and the deferred seq_ids."""

    rows: Sequence[StepSequence]
    results: Callable[[], list[SampledToken | FailedRow]]
    deferred: Sequence[int] = ()


def _output(step: int, drawn: _Drawn, load: ExpertLoad | None, prompts: Scores) -> StepOutput:
    rows = list(verify(drawn.rows, drawn.results()))
    return StepOutput(
        step,
        tuple((i, row) for i, row in rows if not isinstance(row, FailedRow)),
        load,
        tuple((i, row.reason) for i, row in rows if isinstance(row, FailedRow)),
        tuple(i for i, row in rows if isinstance(row, FailedRow) and row.forbidden),
        tuple(drawn.deferred),
        prompts=prompts,
    )


def verify(
    rows: Sequence[StepSequence], drawn: Sequence[SampledToken | FailedRow]
) -> Iterator[tuple[int, SampledToken | FailedRow]]:
    """Yields (seq_id, token) of the valid tokens: per sequence, those up to and including the first
    that differs from its draft. A failed row counts only if it is the sequence's first; otherwise
    the sequence keeps its earlier tokens and fails in a later step."""
    begun: set[int] = set()
    settled: set[int] = set()
    for row, token in zip(rows, drawn, strict=True):
        if row.seq_id in settled:
            continue
        failed = isinstance(token, FailedRow)
        if isinstance(token, FailedRow) or token.token_id not in row.drafts[:1]:
            settled.add(row.seq_id)
        if not (failed and row.seq_id in begun):
            yield row.seq_id, token
        begun.add(row.seq_id)


def dummy_batch(
    num_tokens: int, num_seqs: int, block_size: int, groups: Sequence[KVGroup]
) -> StepBatch:
    """Returns `num_seqs` prompts of together at least `num_tokens` tokens, all in the same
    `num_dummy_blocks` blocks of each KV group (one block of states, which may be few), because
    their results do not matter."""
    length = -(-num_tokens // num_seqs)
    blocks = num_dummy_blocks(num_tokens, num_seqs, block_size)
    tables = [(0,) * blocks if group.state else tuple(range(blocks)) for group in groups]
    sequences = (
        StepSequence(seq_id, (0,) * length, 0, tables, SamplingParams())
        for seq_id in range(num_seqs)
    )
    return StepBatch(0, tuple(sequences))


def _costly(batch: StepBatch, vocab_size: int, device: torch.device) -> StepBatch:
    sequences = (
        replace(sequence, sampling=COSTLY, counts=TokenCounts(vocab_size, device))
        for sequence in batch.sequences
    )
    return replace(batch, sequences=tuple(sequences))


def num_dummy_blocks(num_tokens: int, num_seqs: int, block_size: int) -> int:
    return -(-num_tokens // (num_seqs * block_size))


# ---- the experts' load ----


def summarize_loads(loads: Tensor, ep: int) -> Callable[[], ExpertLoad]:
    """Summarizes `loads` (int64 `[layers, experts]`: tokens per expert); `ep` ranks hold equal
    shares of the experts. Returns a callable that waits for the device."""
    by_rank = loads.sum(0).view(ep, -1).sum(1)
    balancedness = loads.float().mean(1) / loads.amax(1).clamp(min=1)
    fetched = begin_fetch(by_rank, balancedness.mean())

    def load() -> ExpertLoad:
        assignments, mean = fetched()
        return ExpertLoad(tuple(assignments.tolist()), float(mean))

    return load
