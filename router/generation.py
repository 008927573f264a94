"""What the HTTP and gRPC fronts ask of the pipeline, and what it yields."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.router.admission import Batch


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its `n` choices; validated, so it fits the model and its window."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""  # requests with different salts share no cached blocks
    batch: Batch = field(default_factory=Batch, compare=False)  # the body it is part of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in one choice. The last delta of a choice carries `finish_reason`."""

    choice: int
    text: str  # whole characters, no part of a stop string
    tokens: tuple[SampledToken, ...]  # the tokens drawn, whether or not their text is out yet
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id in stop_token_ids


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The last thing a generation yields."""

    prompt_tokens: int
    completion_tokens: int  # over all choices
    cached_tokens: int
    timeline: Timeline


class Generator(Protocol):
    """The pipeline, as the fronts see it."""

    def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationStats, None]:
        """Yields deltas of all choices, interleaved, then one GenerationStats.

        `aclose()`, or cancelling the task that iterates, aborts the work on every node.

        Raises:
            PdserveError: the request cannot be served or failed for good. Other exceptions
                are defects.
        """

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now; the reason when not."""

    def cluster(self) -> dict[str, Any]:
        """The nodes and their state, as JSON for people."""
