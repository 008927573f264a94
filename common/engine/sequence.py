"""A sequence on a node: its tokens, its blocks, and how much of its KV is computed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

from pdserve.common.core.block_hash import BlockHash, BlockHasher, root_hash
from pdserve.common.core.prompt_logprobs import PromptLogprobs, join
from pdserve.common.core.request import FinishReason
from pdserve.common.core.sampling import SampledToken, SamplingParams


class Status(Enum):
    NEW = auto()  # not yet in the scheduler
    WAITING = auto()  # queued, without blocks
    REMOTE = auto()  # has blocks that another node fills
    RUNNING = auto()  # has blocks and is computed
    HELD = auto()  # has blocks that may be read; never computed again
    DONE = auto()  # released


@dataclass(slots=True)
class Times:
    """Seconds in steps and seconds preempted (from a preemption until the next token), disjoint, by
    this process's monotonic clock."""

    in_steps: float = 0.0
    preempted: float = 0.0
    _until: float = 0.0  # end of the last step; in a pipeline the next one may overlap it
    _preempted_at: float | None = None

    def step(self, begun: float, ended: float, samples: bool) -> None:
        """Adds a step that computed the sequence."""
        if self._preempted_at is None:
            self.in_steps += ended - max(begun, self._until)
        elif samples:
            self.preempted += ended - self._preempted_at
            self._preempted_at = None
        self._until = ended

    def preempt(self, now: float) -> None:
        if self._preempted_at is None:
            self._preempted_at = now


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence. `token_ids` is prompt + output. KV of tokens `[0, num_computed)` exists; steps in
    flight compute up to `num_scheduled`; the rest is still to be scheduled. With asynchronous
    scheduling `num_scheduled` may count a token that a step in flight will sample."""

    seq_id: int
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    choice: int = 0
    request_id: str = ""
    cache_salt: str = ""
    adapter: str = ""  # digest of its LoRA adapter
    client: str = ""  # owner, for fair scheduling
    router: str = ""  # id of the router that placed it
    priority: int = 0  # lower values first
    remote: bool = False  # its KV comes from another node
    hands_over: bool = False  # it ends here with its first token: another node continues it
    status: Status = Status.NEW
    num_computed: int = 0
    num_scheduled: int = 0
    num_cached: int | None = None  # tokens found in the prefix cache at the first admission
    round: int = 0  # fair-queueing round while it waits or prefills (`fair_queue`)
    last_taken: int = 0  # counter value when a step last included it (`StepBuilder`)
    num_shared: int = 0  # blocks that other sequences held when it was admitted
    num_overtaken: int = 0  # blocks given to later sequences while it waited for its own
    # One per KV group while it has blocks (`kv_pool.py`).
    block_tables: list[list[int]] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    _hasher: BlockHasher | None = None
    cancelled: bool = False
    times: Times = field(default_factory=Times)
    # Scores of the prompt computed so far, in parts; None: not requested, or already taken.
    prompt_logprobs: list[PromptLogprobs] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """The number of tokens without KV."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """The number of tokens that no step has included yet; -1 if a step has the next one,
        which is not known yet."""
        return len(self.token_ids) - self.num_scheduled

    @property
    def in_flight(self) -> bool:
        """Whether a step is computing it."""
        return self.num_scheduled > self.num_computed

    @property
    def awaits(self) -> bool:
        """Whether all its tokens are in steps, of which one will sample the next."""
        return self.num_unscheduled == 0

    @property
    def decodes(self) -> bool:
        """Whether its next step computes only the token that was sampled last."""
        return self.num_unscheduled == 1 and self.num_scheduled >= self.num_prompt_tokens

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Returns the hashes of all full blocks."""
        known, full = len(self.block_hashes), len(self.token_ids) // block_size
        if known < full:
            if self._hasher is None:  # a simulated prompt comes with its hashes
                root = root_hash(self.cache_salt, self.adapter)
                self._hasher = BlockHasher(block_size, self.block_hashes[-1] if known else root)
            start, end = known * block_size, full * block_size
            self.block_hashes += self._hasher.extend(self.token_ids, start, end)
        return self.block_hashes

    def scored(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the prompt tokens after those at `start … end-1`, if the prompt is scored."""
        if self.prompt_logprobs is None:
            return ()
        return tuple(self.token_ids[start + 1 : min(end + 1, self.num_prompt_tokens)])

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Adds a step's scores; they replace those from before a preemption."""
        if self.prompt_logprobs is not None:
            kept = [each for each in self.prompt_logprobs if each.start < found.start]
            self.prompt_logprobs = [*kept, found]

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns all scores the first time, None if not requested or already taken."""
        parts, self.prompt_logprobs = self.prompt_logprobs, None
        return None if parts is None else join(parts, self.sampling.prompt_logprobs or 0)

    def append(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended; `stop_token_id` is set if a stop token (not EOS) ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


def check_finish(
    sequence: Sequence, eos_token_ids: SequenceOf[int], max_model_len: int
) -> Finish | None:
    """Returns a Finish if the last token ends the sequence. `min_tokens` needs no check here: the
    sampler bans tokens that would end it too early."""
    last, params = sequence.token_ids[-1], sequence.sampling
    if last in params.stop_token_ids:
        return Finish(FinishReason.STOP, last)
    if last in eos_token_ids and not params.ignore_eos:
        return Finish(FinishReason.STOP)
    if reaches_limit(sequence, 0, max_model_len):
        return Finish(FinishReason.LENGTH)
    return None


def reaches_limit(sequence: Sequence, more: int, max_model_len: int) -> bool:
    """Returns whether `more` tokens end the sequence by its length."""
    most = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, max_model_len)
    return sequence.num_tokens + more >= most
