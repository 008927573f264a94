"""One sequence on a node: its tokens, and how much of their KV exists in which blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

from pdserve.common.core.prompt_logprobs import PromptLogprobs, join
from pdserve.common.core.request import FinishReason
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.block_pool import BlockHash, hash_blocks


class Status(Enum):
    NEW = auto()  # the scheduler does not know it yet
    WAITING = auto()  # owns no blocks
    REMOTE = auto()  # owns blocks that another node fills
    RUNNING = auto()  # owns blocks and is computed
    HELD = auto()  # owns blocks that are being read; never computed again
    DONE = auto()  # owns no blocks, for good


@dataclass(slots=True)
class Times:
    """How long a sequence has been computed, and how long preempted: from then until it had its
    next token. Seconds of this process's monotonic clock, no moment in both."""

    in_steps: float = 0.0
    preempted: float = 0.0
    _until: float = 0.0  # the end of the last step, which the next may overlap (pipelines)
    _preempted_at: float | None = None

    def step(self, begun: float, ended: float, samples: bool) -> None:
        """A step has computed some of it."""
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
    """`token_ids` is prompt + output. KV of tokens `[0, num_computed)` exists, steps in flight
    compute it up to `num_scheduled`; a decode step takes one of the rest, a prefill step many."""

    seq_id: int
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    choice: int = 0
    request_id: str = ""
    cache_salt: str = ""
    adapter: str = ""  # digest of the LoRA adapter that computes it
    client: str = ""  # whose it is
    priority: int = 0  # lower ones come first
    remote: bool = False  # its KV comes from another node
    status: Status = Status.NEW
    num_computed: int = 0
    num_scheduled: int = 0
    num_cached: int | None = None  # tokens found in the prefix cache at the first admission
    turn: int = 0  # its round, while it waits or its prompt is computed (`turns`)
    last_taken: int = 0  # by a step: in which order sequences were (`StepBuilder`)
    num_overtaken: int = 0  # blocks that later ones were given while it waited for its own
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    cancelled: bool = False
    times: Times = field(default_factory=Times)
    # Of its prompt, as far as computed, in parts; None: nobody wants them (any more).
    prompt_logprobs: list[PromptLogprobs] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens that no step has taken yet."""
        return len(self.token_ids) - self.num_scheduled

    @property
    def in_flight(self) -> bool:
        """Whether a step computes it now."""
        return self.num_scheduled > self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether its next step takes the token that was sampled last, and no others."""
        return self.num_unscheduled == 1 and self.num_scheduled >= self.num_prompt_tokens

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Hashes of all full blocks of the tokens so far."""
        if (len(self.block_hashes) + 1) * block_size <= len(self.token_ids):
            self.block_hashes = hash_blocks(
                self.token_ids, block_size, self.block_hashes, self.cache_salt, self.adapter
            )
        return self.block_hashes

    def scored(self, start: int, end: int) -> tuple[int, ...]:
        """The prompt tokens that follow those at `start … end-1`, if they are to be scored."""
        if self.prompt_logprobs is None:
            return ()
        return tuple(self.token_ids[start + 1 : min(end + 1, self.num_prompt_tokens)])

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """A step's. One that was preempted computes them again."""
        if self.prompt_logprobs is not None:
            kept = [each for each in self.prompt_logprobs if each.start < found.start]
            self.prompt_logprobs = [*kept, found]

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """All of them, once; None if nobody wants them."""
        parts, self.prompt_logprobs = self.prompt_logprobs, None
        return None if parts is None else join(parts, self.sampling.prompt_logprobs or 0)

    def append(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ends; `stop_token_id` when a stop token (not EOS) ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


def check_finish(
    sequence: Sequence, eos_token_ids: SequenceOf[int], max_model_len: int
) -> Finish | None:
    """Whether the last token ends the sequence. `min_tokens` needs no check here: the sampler
    bans the tokens that could end it too early."""
    last, params = sequence.token_ids[-1], sequence.sampling
    if last in params.stop_token_ids:
        return Finish(FinishReason.STOP, last)
    if last in eos_token_ids and not params.ignore_eos:
        return Finish(FinishReason.STOP)
    if sequence.num_output_tokens >= params.max_tokens or sequence.num_tokens >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
