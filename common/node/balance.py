"""The choice of the replica that takes a job. It is policy only: numbers in, a choice out.

    work = tokens to be computed before the job's first one
             those that sequences here still wait for, and what of the job is not cached
         + tokens whose KV every decode step here reads

Among the replicas that can take the job at once, or among all if none can, it chooses the one with
the least work, then the fewest sequences, then the lowest index. So cached tokens attract a job to
the least work, then the fewest sequences, then the lowest index. So cached tokens attract a job to
their replica until it has as many more pending tokens than another: prefixes stay together
NVIDIA Dynamo's KV router.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.common.core.block_hash import BlockHash, hash_blocks
from pdserve.common.core.request import GenerateJob
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describes a replica that could take a job."""

    replica: int
    pending_tokens: int  # of sequences here, not yet computed
    decoding_tokens: int  # of sequences here that decode, or will once their KV has landed
    missing_tokens: int  # of the job, not in the prefix cache
    num_sequences: int
    fits: bool  # the job need not wait for blocks or for its turn

    @property
    def work(self) -> int:
        return self.pending_tokens + self.decoding_tokens + self.missing_tokens


def choose(candidates: Iterable[Candidate]) -> int:
    """Returns the index of the replica that takes the job; there is at least one candidate."""
    best = min(candidates, key=lambda c: (not c.fits, c.work, c.num_sequences, c.replica))
    return best.replica


def choose_replica(schedulers: dict[int, Scheduler], job: GenerateJob) -> int:
    """Chooses among the replicas of these schedulers, by index."""
    if len(schedulers) == 1:
        return next(iter(schedulers))  # without hashing the prompt
    tokens, pool = job.token_ids, next(iter(schedulers.values())).pool
    hashes = (
        hash_blocks(tokens, pool.block_size, cache_salt=job.cache_salt, adapter=job.adapter)
        if pool.prefix_caching
        else []
    )
    return choose(candidate(i, each, len(tokens), hashes) for i, each in schedulers.items())


def candidate(
    replica: int, scheduler: Scheduler, num_tokens: int, hashes: Sequence[BlockHash]
) -> Candidate:
    """Describes a replica for a job of `num_tokens` tokens, whose full blocks have `hashes`."""
    pool = scheduler.pool
    fit = pool.fit(hashes, num_tokens, remote=False)
    sequences = [*scheduler.waiting, *scheduler.running, *scheduler.remote]
    # The scheduler admits likewise: a spare block for each running sequence, the queue first.
    promised = sum(pool.most_blocks(each.num_tokens) for each in scheduler.waiting)
    has_room = pool.has_room(fit, promised + len(scheduler.running), scheduler.running)
    decoding = [each.num_tokens for each in sequences if decodes(each)]
    return Candidate(
        replica=replica,
        pending_tokens=sum(each.num_pending for each in sequences if not decodes(each)),
        decoding_tokens=sum(decoding),
        missing_tokens=num_tokens - fit.num_cached * pool.block_size,
        num_sequences=len(sequences),
        fits=len(sequences) < scheduler.config.seqs and has_room,
    )


def decodes(sequence: EngineSequence) -> bool:
    """Returns whether a sequence decodes, or will without being computed here first."""
    return sequence.remote or (sequence.num_output_tokens > 0 and sequence.num_pending == 1)
