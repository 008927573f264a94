"""One request on its way: its choices' tokens and text so far, its times, its failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Blame, NodeError
from pdserve.common.core.request import Choice, FinishReason, GenerateJob, Timeline, TokenEvent
from pdserve.common.core.sampling import SampledToken
from pdserve.common.text.stream import TextStream
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.deadline import Deadline
from pdserve.router.generation import GenerationRequest, GenerationStats, TextDelta
from pdserve.router.recovery import Recovery


class Run:
    """What one request has become so far: its choices' tokens and text, its times."""

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, config: RoutingConfig
    ) -> None:
        self.recovery = Recovery(config.migration_limit)
        self.deadline = Deadline(config.queue_timeout, config.request_timeout)
        # What the client has not read yet: at most max_tokens for each choice. None: the end.
        self.deltas: asyncio.Queue[TextDelta | None] = asyncio.Queue()
        self.ended = asyncio.Event()  # every choice has finished
        self.cached_tokens = self.transfer_bytes = 0
        self.transfer_seconds = 0.0
        # Fingerprint of the nodes that have made the tokens so far: an answer is never made of
        # two versions of a model.
        self.version: str | None = None
        self.finish_reasons: list[FinishReason] = []
        self.token_gaps: list[float] = []
        self._request = request
        self._start = monotonic()
        self._moments: dict[str, float] = {}
        self._num_tokens = 0
        self._last_token: dict[int, float] = {}
        self._outputs: dict[int, list[int]] = {choice: [] for choice in range(request.n)}
        self._open = {
            choice: TextStream(
                tokenizer,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
            )
            for choice in range(request.n)
        }

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def admission(self) -> tuple[Batch, int, int]:
        """What it takes places as: the body it is part of, its tokens and its choices."""
        return self._request.batch, len(self._request.prompt_token_ids), self._request.n

    @property
    def job(self) -> GenerateJob:
        """What is left to do: the choices that are open, from where they are."""
        request = self._request
        return GenerateJob(
            request.request_id,
            tuple(request.prompt_token_ids),
            request.sampling,
            tuple(Choice(index, tuple(self._outputs[index])) for index in self._open),
            request.cache_salt,
        )

    @property
    def num_tokens(self) -> int:
        """How many are to be prefilled now."""
        return len(self._request.prompt_token_ids) + len(self._outputs[min(self._open)])

    @property
    def begun(self) -> bool:
        """Whether the client has a token."""
        return self.version is not None

    @property
    def finished(self) -> bool:
        return not self._open

    def check_finished(self) -> None:
        """Raises NodeError when the decode node ended its stream and a choice is open."""
        if self._open:
            raise NodeError(
                f"the decode node's stream ended before choice {min(self._open)} did",
                code="PROTOCOL_ERROR",
                blame=Blame.DECODE,
            )

    def mark(self, moment: str) -> None:
        """Notes that a moment of the timeline (one of its fields) is now, the first time. It is
        progress every time."""
        self.deadline.progress()
        self._moments.setdefault(moment, monotonic() - self._start)

    def fault_of(self, event: TokenEvent, vocab_size: int) -> str:
        """Why no node that does its work tells these tokens; empty: one may."""
        if event.choice not in self._outputs:
            return f"there is no choice {event.choice}"
        left = self._request.sampling.max_tokens - len(self._outputs[event.choice])
        ended = event.finish_reason is not None or event.choice not in self._open
        if (not ended and not 0 < len(event.tokens) < left) or len(event.tokens) > left:
            return f"{len(event.tokens)} where {left} are left"
        if any(token_id >= vocab_size for token in event.tokens for token_id in _ids(token)):
            return "it is outside the vocabulary"
        return ""

    def take(self, event: TokenEvent, role: str, version: str) -> bool:
        """Tokens that a node of this role has made: their text is on its way to the client. What
        comes for a choice after a stop string has ended it is dropped. Returns whether these have
        ended a choice and the node does not know."""
        self.version = version
        if taken := event.choice in self._open:
            self.recovery.progress(role)
            self.deadline.token()
            self.deltas.put_nowait(self._delta(self._open[event.choice], event))
        if self.finished:
            self.ended.set()
        return taken and event.choice not in self._open and event.finish_reason is None

    def _delta(self, stream: TextStream, event: TokenEvent) -> TextDelta:
        output = stream.push(
            [token.token_id for token in event.tokens],
            final=event.finish_reason is not None,
            stop_token=event.finish_reason is FinishReason.STOP,
        )
        self._outputs[event.choice] += [token.token_id for token in event.tokens]
        self._count(event.choice, output.num_tokens)
        reason = FinishReason.STOP if output.stopped_by is not None else event.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            del self._open[event.choice]
        stop_reason = output.stopped_by if output.stopped_by is not None else event.stop_token_id
        tokens = event.tokens[: output.num_tokens]
        return TextDelta(event.choice, output.text, tokens, reason, stop_reason)

    def stats(self) -> GenerationStats:
        timeline = Timeline(
            **self._moments,  # type: ignore[arg-type]
            cached_tokens=self.cached_tokens,
            transfer_bytes=self.transfer_bytes,
            transfer_seconds=self.transfer_seconds,
            migrations=self.recovery.failures,
        )
        return GenerationStats(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self.cached_tokens,
            timeline=timeline,
        )

    def _count(self, choice: int, num_tokens: int) -> None:
        now = monotonic()
        self.mark("first_token")
        if choice in self._last_token and num_tokens:
            self.token_gaps += [(now - self._last_token[choice]) / num_tokens] * num_tokens
        self._last_token[choice] = now
        self._num_tokens += num_tokens


def _ids(token: SampledToken) -> Iterator[int]:
    yield token.token_id
    if token.logprobs is not None:
        yield from (token_id for token_id, _ in token.logprobs.top)
