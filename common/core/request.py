"""What travels between router and nodes for one sequence: the job and its events."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

from pdserve.common.core.sampling import SampledToken, SamplingParams

_ID = re.compile(r"[!-~]{1,128}")


def new_request_id(prefix: str) -> str:
    """For example `cmpl-5f0c…` (24 hex digits)."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_call_id() -> str:
    """Of a tool call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def is_plain_id(given: str) -> bool:
    """Whether an id that others chose is a short word of ASCII: fit for headers, metadata, logs."""
    return _ID.fullmatch(given) is not None


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token (or, in the router, a stop string)
    LENGTH = "length"  # max_tokens or the context window


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation of a prompt. It samples with seed + `index`, wherever it runs, so another
    node goes on after `output_token_ids` as if nothing had happened."""

    index: int = 0
    output_token_ids: tuple[int, ...] = ()  # generated before, by nodes that failed


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Choices of one request that go on together. All share one prefill and one transfer: of
    the first choice's tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[Choice, ...] = (Choice(),)
    cache_salt: str = ""  # jobs with different salts share no cached blocks
    timed: bool = False  # its tokens say how long the node has spent on them
    adapter: str = ""  # the digest of the LoRA adapter that computes it
    priority: int = 0  # lower ones come first
    client: str = ""  # whose it is: clients take turns on nodes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What is prefilled: the prompt and what the first choice has generated before."""
        return self.prompt_token_ids + self.choices[0].output_token_ids


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens of one choice, in order. The last event of a choice carries `finish_reason`."""

    choice: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, if one did


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a part of a request's time went. Each stage begins where the one before ends."""

    name: str
    node: str  # its id, or "router"
    start: float  # seconds since the request arrived
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When things happened to one request; seconds since the router accepted it.

    Fields are None until (or unless) the event happened.
    """

    queued: float | None = None  # a place and nodes were granted
    reserved: float | None = None  # the decode node holds blocks
    first_token: float | None = None  # the first token is there (TTFT)
    transferred: float | None = None  # the decode node holds all KV
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens that who computed the prompt found in its prefix cache
    prefill_queue_seconds: float = 0.0  # that the prompt waited for blocks or its turn there
    prefill_seconds: float = 0.0  # that steps computed it there
    decode_cached_tokens: int = 0  # prompt tokens whose KV the decode node had already
    transfer_bytes: int = 0  # KV bytes that crossed between the nodes
    transfer_seconds: float = 0.0  # from the first run sent to the last one landed
    data_seconds: float = 0.0  # from the ticket until all KV was in the decode node's blocks
    commit_seconds: float = 0.0  # from the ticket until the prefill node had committed
    verify_seconds: float = 0.0  # from the later of both until the digests were compared
    migrations: int = 0  # times a node failed and the request went on on others
    exposed_seconds: float = 0.0  # of the transfer, after the prompt was computed
    overlapped_seconds: float = 0.0  # of the transfer, while it was computed
    total_seconds: float = 0.0  # from the request's arrival until this was written
    stages: tuple[Stage, ...] = ()  # if asked for: they add up to that
