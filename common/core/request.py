"""Jobs and token events between router and nodes, and a request's timeline."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from pdserve.common.core.sampling import SampledToken, SamplingParams

_ID = re.compile(r"[!-~]{1,128}")


def new_request_id(prefix: str) -> str:
    """Returns a random id such as `cmpl-5f0c…` (24 hex digits)."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_call_id() -> str:
    """Returns a random id of a tool call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def is_plain_id(given: str) -> bool:
    """Returns whether `given` is 1 to 128 printable ASCII characters without spaces, which is safe
    in headers, metadata and logs."""
    return _ID.fullmatch(given) is not None


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token (or, in the router, a stop string)
    LENGTH = "length"  # max_tokens or the context window


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation of a prompt. It samples with seed + `index` on any node, so another node can
    continue after `output_token_ids` with the same tokens."""

    index: int = 0
    output_token_ids: tuple[int, ...] = ()  # already generated, by nodes that failed


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Choices of one request that run together. They share one prefill and one transfer, of the
    first choice's tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[Choice, ...] = (Choice(),)
    cache_salt: str = ""  # jobs with different salts share no cached blocks
    timed: bool = False  # whether token events carry the node's times
    adapter: str = ""  # digest of its LoRA adapter; "": the base model
    priority: int = 0  # lower values first
    client: str = ""  # owner of the job, for fair scheduling
    router: str = ""  # id of the router that placed it
    orphan_key: bytes = b""  # other routers may join it by this; b"": none may

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens to prefill: the prompt and the first choice's earlier output."""
        return self.prompt_token_ids + self.choices[0].output_token_ids


class TokenEvent(msgspec.Struct, frozen=True):
    """Tokens of one choice, in order. The last event of a choice carries `finish_reason`."""

    choice: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, if one did


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """A stage of a request's timeline. Each begins where the one before ends."""

    name: str
    node: str  # node id, or "router"
    start: float  # seconds since the request arrived
    seconds: float


class PromptPath(StrEnum):
    """How a decode node got the KV of a prompt."""

    TRANSFERRED = "transferred"  # from a prefill node
    LOCAL = "local"  # computed it as configured: a node of both roles, or a short prompt
    STAND_IN = "stand_in"  # computed it because no prefill node could


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of one request. Times of events are seconds since the router accepted it, None
    until (or unless) they happen."""

    queued: float | None = None  # admitted, and nodes chosen
    reserved: float | None = None  # the decode node has reserved blocks
    first_token: float | None = None  # TTFT
    transferred: float | None = None  # the decode node has all KV
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache of the node that prefilled
    prefill_queue_seconds: float = 0.0  # waiting for blocks or its turn on that node
    prefill_seconds: float = 0.0  # in steps on that node
    decode_cached_tokens: int = 0  # prompt tokens in the decode node's prefix cache
    transfer_bytes: int = 0  # KV bytes sent between the nodes
    transfer_seconds: float = 0.0  # from the first run sent to the last one received
    data_seconds: float = 0.0  # from the ticket until the decode node had all KV
    commit_seconds: float = 0.0  # from the ticket until the prefill node had committed
    verify_seconds: float = 0.0  # from the later of the two until the digests were compared
    migrations: int = 0  # times the request moved to other nodes after a failure
    exposed_seconds: float = 0.0  # part of the transfer after the prompt was computed
    overlapped_seconds: float = 0.0  # part of the transfer while the prompt was computed
    total_seconds: float = 0.0  # from the request's arrival until this was written
    path: str = ""  # a PromptPath: how the decode node got the prompt's KV
    prefill_node: str = ""  # id of the node that computed the prompt last
    decode_node: str = ""
    kv_connectors: tuple[str, ...] = ()  # connectors that moved the KV
    verified_runs: int = 0  # runs of KV whose digests were compared
    recomputed_tokens: int = 0  # prompt tokens computed by more than one node
    stages: tuple[TimelineStage, ...] = ()  # only if requested; they add up to total_seconds
